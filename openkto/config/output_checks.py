"""The rules of what a run writes elsewhere than into its folder."""

from __future__ import annotations

import re

from openkto.config import OutputConfig
from openkto.config.engine_checks import Place
from openkto.config.output import TRACKERS
from openkto.errors import fail, need_package

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
SWITCHES = ("true", "false", "yes", "no", "on", "off")  # other trainers' --push_to_hub is one


def check_output(output: OutputConfig, place: Place) -> None:
    """Raise a ConfigError for the first rule that is broken."""
    if output.use_wandb:
        need_package(place("use_wandb"), "wandb", TRACKERS["wandb"])
    for tracker in output.report_to:
        if tracker != "tensorboard":
            need_package(place("report_to"), tracker, TRACKERS[tracker])
        elif output.use_tensorboard == "none":
            cure = "Leave one of them out."
            fail(place("report_to"), "must not name tensorboard when that is off", "--use_tensorboard none", cure)
    name = output.push_to_hub
    if name is None:
        if output.hub_public:
            fail(place("hub_public"), "needs --push_to_hub", "none", "Give it a name, or leave this out.")
    elif name.lower() in SWITCHES or not HUB_NAME.fullmatch(name):
        rule = "must be the name of a repository on the Hub, such as my-name/support"
        fail(place("push_to_hub"), rule, repr(name), "Give it one, or leave it out.")
