"""The folders that a command writes to: created, locked, and not another run's unless --overwrite is given."""

import logging
import os
from pathlib import Path

from openkto.config import RunConfig, to_yaml
from openkto.distributed.checkpoint import Found
from openkto.distributed.checkpoint_folder import held_in
from openkto.errors import ConfigError
from openkto.files import make_writable, numbered
from openkto.models.model_files import kind_of_model
from openkto.process.run_lock import RunLocks
from openkto.report.records import METRICS, belongs_to

log = logging.getLogger(__name__)


def take_folders(config: RunConfig, locks: RunLocks) -> None:
    """Make the folders that a run writes into and keep other runs out of them; for one rank.

    Raises:
        ConfigError: another run is in one of them or has left its model or checkpoints there, or nothing can be
            written there.
    """
    folder, root = Path(config.output.save_path), checkpoints_root(config)
    make_folder(folder)
    locks.take("--save_path", folder)
    if config.checkpoint.save_hf_ckpt or not config.checkpoint.disable_ds_ckpt:
        locks.take("--ckpt_path", root)
    if not config.checkpoint.load_checkpoint:
        check_replaces_nothing(config, None)


def checkpoints_root(config: RunConfig) -> Path:
    """Return the folder of the run's checkpoints."""
    return Path(config.checkpoint.ckpt_path or Path(config.output.save_path) / "checkpoints")


def make_folder(folder: Path) -> None:
    """Make the folder of the run's files, and see that files can be written there.

    Raises:
        ConfigError: they cannot.
    """
    try:
        make_writable(folder)
    except OSError as error:
        raise ConfigError(
            f"--save_path: must be a folder that can be written; got {folder} ({error.strerror}). Name another."
        ) from error


def check_replaces_nothing(config: RunConfig, found: Found | None) -> None:
    """See that a start neither replaces nor mixes with what another run left, unless `--overwrite` says so.

    Args:
        found: the checkpoint that is resumed from; None in a run that starts from the beginning.

    Raises:
        ConfigError: it would.
    """
    folder, root = Path(config.output.save_path), checkpoints_root(config)
    if config.checkpoint.overwrite:
        return
    held = []
    kind = kind_of_model(folder)
    if kind is not None and not (found is not None and _is_models_run(folder, found)):
        held.append(kind)
    checkpoints = held_in(root)
    if checkpoints and (found is None or not _is_in(found.folder, root)):
        held.append(f"the checkpoint {root / checkpoints[0]}")
    if held:
        cure = "" if config.checkpoint.load_checkpoint else "--load_checkpoint to resume the run that left it, or "
        raise ConfigError(
            f"--save_path: must not hold another run; got {folder} with {' and '.join(held)}. Name another "
            f"folder, or pass {cure}--overwrite to replace the model and keep the rest under a number."
        )


def _is_models_run(folder: Path, found: Found) -> bool:
    """Whether the run of a checkpoint is the one that the folder's model comes from."""
    is_told = (folder / METRICS).exists() or _is_in(found.folder, folder)
    return is_told and belongs_to(folder, found.state["run"]["run_id"])


def _is_in(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def check_has_no_model(config: RunConfig) -> None:
    """See that a command which writes one model replaces none.

    Raises:
        ConfigError: it would, and was not asked to.
    """
    folder = Path(config.output.save_path)
    kind = kind_of_model(folder)
    if kind is not None and not config.checkpoint.overwrite:
        raise ConfigError(
            f"--save_path: must not hold a model already; got {folder} with {kind}. Name another folder, or pass "
            "--overwrite to replace it."
        )


def write_run_file(config: RunConfig, folder: Path) -> None:
    """Write run.yaml, which starts the same run again; see `write_beside_model`."""
    write_beside_model(folder / "run.yaml", to_yaml(config).encode())


def write_beside_model(file: Path, content: bytes, *, keeps_old: bool = True) -> None:
    """Write a file about the run; that of another run is kept under a number, unless it is to be replaced.

    A run does not need it, so a disk that does not take it is no reason to end one.
    """
    part = file.with_name(f"{file.name}.part")
    try:
        if file.is_file() and file.read_bytes() == content:
            return
        part.write_bytes(content)
        if keeps_old and file.exists():
            file.rename(numbered(file))
        os.replace(part, file)
    except OSError as error:
        part.unlink(missing_ok=True)
        log.warning("warning: %s: could not be written (%s); the run continues without it.", file, error.strerror)
