"""`openkto convert_checkpoint`, `cli/convert_checkpoint.py`: a DeepSpeed checkpoint as a Hugging Face folder.

It needs no process group and no GPU: the model that training started from is loaded on the CPU and given the
checkpoint's weights.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openkto.config import LoraConfig, from_flat, policy_name
from openkto.config.flags import parse
from openkto.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


def main(argv: list[str]) -> None:
    """Convert as the command line says.

    Raises:
        OpenKTOError: something that the user can act on.
    """
    config, _ = parse(argv, "convert_checkpoint")
    from openkto.commands.card import base_model, write_card
    from openkto.commands.folder import check_has_no_model, make_folder
    from openkto.commands.rows import load_tokenizer_of
    from openkto.distributed.checkpoint_folder import find
    from openkto.distributed.gather import gather_weights
    from openkto.distributed.portable import read_masters
    from openkto.models import Actor
    from openkto.models.adapter import base_of
    from openkto.models.loading import DTYPES

    given, settings = Path(str(config.checkpoint.load_checkpoint)), config.model
    place = find(given)
    folder = place.root / place.names[0] if place.names else given  # that of another program
    if os.path.realpath(config.output.save_path) == os.path.realpath(settings.pretrain):
        raise ConfigError(
            f"--save_path: must not be the folder of --pretrain; got {config.output.save_path}. Name another folder."
        )
    check_has_no_model(config)
    state = check_checkpoint(folder)
    run = state.get("settings", {})
    dtype = DTYPES[settings.export_dtype or run.get("param_dtype") or "fp32"]
    lora = from_flat({**run, "pretrain": settings.pretrain}).lora if run else LoraConfig()
    actor = Actor(policy_name(settings), dtype=dtype, trust_remote_code=settings.trust_remote_code, lora=lora)
    put_in(folder, actor, read_masters(folder))
    make_folder(Path(config.output.save_path))
    weights = gather_weights(actor.model, dtype, trainable_only=actor.has_adapter)
    actor.export(weights, load_tokenizer_of(config, policy_name(settings)), config.output.save_path, dtype)
    log.info("the %s is in %s", "adapter" if actor.has_adapter else "model", config.output.save_path)
    of_run = folder_of_run(folder, state)
    if of_run is not None:
        base = base_model(base_of(policy_name(settings)))
        write_card(Path(config.output.save_path), base, of_run=of_run, step=state["run"]["step"])


def folder_of_run(checkpoint: Path, state: dict[str, Any]) -> Path | None:
    """Return where the run that wrote a checkpoint has its records; None where they are not there any more."""
    from openkto.report.records import METRICS, belongs_to

    if not state:
        return None
    places = (checkpoint.resolve().parent.parent, Path(state["settings"].get("save_path", "")))
    found = (place for place in places if (place / METRICS).is_file() and belongs_to(place, state["run"]["run_id"]))
    return next(found, None)


def check_checkpoint(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint says of the run that wrote it, or nothing for another program's.

    Raises:
        CheckpointError: a file is not as it was written.
    """
    from openkto.distributed.manifest import MANIFEST, STATE, NewerFormatError, check_files
    from openkto.distributed.state_file import read_state

    if not (folder / STATE).is_file() and not (folder / MANIFEST).is_file():
        log.warning("warning: %s: has no manifest to compare its files with; its files are read unchecked.", folder)
        return {}
    try:
        check_files(folder)
        return read_state(folder)
    except NewerFormatError:
        raise
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder}: must be a complete checkpoint; got one where {error}. Name another."
        ) from None


def put_in(folder: Path, actor: Any, masters: Iterator[tuple[str, Any]]) -> None:
    """Give a model the weights of a checkpoint; its frozen ones are the model's own.

    Raises:
        CheckpointError: it is another model's.
    """
    trained = {name: parameter for name, parameter in actor.named_parameters() if parameter.requires_grad}
    left = set(trained)
    others = []
    for name, flat in masters:
        # Other programs train the model itself, not one inside an actor.
        own = next((known for known in (name, f"model.{name}") if known in trained), None)
        if own is None or trained[own].numel() != flat.numel():
            others.append(name)
            continue
        trained[own].data.copy_(flat.view(trained[own].shape))
        left.discard(own)
    if left:
        raise CheckpointError(
            f"{folder}: must hold every trained weight of --pretrain; got none for {min(left)}, and for others "
            f"{min(others, default='nothing')}. Name the model that this checkpoint was trained from."
        )
