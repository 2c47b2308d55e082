"""The rules between settings of the reference: where it comes from, whether it moves, whether it is cached."""

from __future__ import annotations

import os

from openkto.config import (
    LOSSES,
    ModelConfig,
    RunConfig,
    is_adapter_folder,
    policy_name,
    ref_is_adapter,
    reference_name,
    trains_adapter,
)
from openkto.config.engine_checks import Place
from openkto.errors import fail as _fail


def check_moving_reference(config: RunConfig, place: Place) -> None:
    """Check that a reference that moves is a whole model in memory."""
    if config.model.ref_sync_steps == 0:
        return
    if trains_adapter(config):
        _fail(
            place("ref_sync_steps"),
            "moves a whole reference model towards a whole policy",
            "a policy with an adapter",
            "Leave it out.",
        )
    if config.model.ref_mode not in ("auto", "model"):
        _fail(
            place("ref_sync_steps"),
            "needs a reference that is a model in memory",
            f"--ref_mode {config.model.ref_mode}",
            "Take --ref_mode model, or leave it out.",
        )


def check_reference(config: RunConfig, place: Place, *, has_adapter: bool) -> None:
    """Check that a policy which is to be its own reference can be."""
    model = config.model
    if model.ref_mode != "adapter":
        return
    if not has_adapter:
        _fail(place("ref_mode"), "adapter needs a policy with an adapter", "none", "Give --lora_rank, or take auto.")
    if reference_name(model) != policy_name(model):
        _fail(
            place("ref_mode"),
            "adapter takes the policy itself as the reference",
            f"the reference {reference_name(model)}",
            "Leave --ref_pretrain and --ref_revision out, or take model.",
        )


def check_cache(config: RunConfig, place: Place, command: str) -> None:
    """Check that a reference which is to be cached can be."""
    model, loss_type = config.model, config.loss.loss_type
    is_wanted = model.ref_mode == "cached" or command == "precompute_reference"
    if is_wanted and LOSSES[loss_type].by_token:
        _fail(
            place("loss_type"),
            "cached keeps the reference's log-probabilities of whole completions, not of each token",
            loss_type,
            "Take --ref_mode model.",
        )
    if command == "precompute_reference" and model.ref_sync_steps > 0:
        _fail(
            place("ref_sync_steps"),
            "cannot be combined with a cached reference, which does not move",
            str(model.ref_sync_steps),
            "Leave it out.",
        )
    if command == "precompute_reference" and model.ref_mode in ("model", "adapter"):
        _fail(
            place("ref_mode"),
            "must be cached or auto, the modes that use a cache",
            model.ref_mode,
            "Take cached, here and to train.",
        )


def check_models_differ(model: ModelConfig, place: Place) -> None:
    """Check that an evaluation has a reference: a model compared with itself gives only zeros and halves."""
    has_adapter = is_adapter_folder(model.pretrain)
    if has_adapter and (model.ref_pretrain is None or ref_is_adapter(model, has_adapter=True)):
        return
    if os.path.realpath(reference_name(model)) == os.path.realpath(policy_name(model)):
        _fail(
            place("ref_pretrain"),
            "must be what the model was trained from",
            f"{model.pretrain} for both",
            "Name the one it started from as --ref_pretrain, and the trained one as --pretrain.",
        )
