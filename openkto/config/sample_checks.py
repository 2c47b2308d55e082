"""The rules between the settings of the answers during training and others."""

from __future__ import annotations

import dataclasses

from openkto.config.engine_checks import Place
from openkto.config.run import RunConfig
from openkto.config.samples import SamplesConfig
from openkto.errors import fail


def check_samples(config: RunConfig, place: Place) -> None:
    """Raise a ConfigError for settings of answers that are not asked for, or that cannot be made."""
    samples = config.samples
    if samples.takes_samples:
        if config.deepspeed.deepcompile:
            name = "num_samples" if samples.num_samples else "sample_prompts"
            fail(
                place(name),
                "cannot go with --deepcompile, which compiles training's forwards",
                "both",
                "Leave one out.",
            )
        return
    for item in dataclasses.fields(SamplesConfig):
        if vars(samples)[item.name] != item.default:
            cure = "Give one of them, or leave it out."
            fail(place(item.name), "works only with --num_samples or --sample_prompts", "neither", cure)
