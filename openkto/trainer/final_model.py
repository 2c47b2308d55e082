"""Writes the trained model, or adapter, as a Hugging Face folder."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from openkto.distributed.agreement import on_some_ranks
from openkto.distributed.gather import gather_weights, whole_shape
from openkto.errors import OpenKTOError, TrainingError
from openkto.files import delete


def save_model(
    engine: Any, strategy: Any, tokenizer: Any, folder: str, dtype: torch.dtype, *, has_refuge: bool
) -> None:
    """Write the policy, or its adapter, with the tokenizer as a Hugging Face folder; all ranks must call it.

    Args:
        has_refuge: where the folder cannot be written, write into a temporary one: hours of training are in the
            weights.

    Raises:
        TrainingError: a weight is not finite, in this dtype; on every rank.
        OpenKTOError: the folder cannot be written; on every rank.
    """
    actor = engine.module
    weights = gather_weights(actor.model, dtype, trainable_only=actor.has_adapter)
    on_some_ranks(
        strategy,
        lambda: _write_model(actor, weights, tokenizer, folder, dtype, has_refuge=has_refuge),
        is_mine=strategy.rank == 0,
    )


def _write_model(
    actor: Any, weights: dict[str, torch.Tensor], tokenizer: Any, folder: str, dtype: torch.dtype, *, has_refuge: bool
) -> None:
    broken = [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise TrainingError(
            f"the trained weights: must be finite in {str(dtype).removeprefix('torch.')}; got nan or infinity in "
            f"{broken[0]} and {len(broken) - 1} more, and nothing was saved. Lower --learning_rate, or pass "
            "--export_dtype fp32."
        )
    try:
        actor.export(weights, tokenizer, folder, dtype)
    except OpenKTOError as error:
        if not has_refuge:
            raise
        outcome = _save_elsewhere(lambda folder: actor.export(weights, tokenizer, folder, dtype))
        raise OpenKTOError(f"{error} {outcome}") from error


def _save_elsewhere(export: Callable[[str], None]) -> str:
    """Write the model into a temporary folder; return what became of it."""
    folder = None
    try:
        folder = tempfile.mkdtemp(prefix="openkto-")
        export(folder)
    except (OSError, OpenKTOError) as error:
        if folder is not None:
            delete(Path(folder))
        return (
            f"Nor could it be saved to a temporary folder ({error}). If the last step has a checkpoint, the same "
            "command with --load_checkpoint saves the model of it."
        )
    return f"The trained model was saved to {folder} instead: move it from there."


def count(parameters: Iterable[nn.Parameter]) -> int:
    """Return the number of weights, of all ranks together."""
    return sum(whole_shape(parameter).numel() for parameter in parameters)
