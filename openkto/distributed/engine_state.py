"""A DeepSpeed engine's state, out to the files of a checkpoint and back."""

from pathlib import Path
from typing import Any

from openkto.distributed.engine_files import RecordingCheckpointEngine
from openkto.distributed.portable import client_state, load_parameters, read_parameters
from openkto.errors import CheckpointError


def save_engine(engine: Any, folder: Path, files: RecordingCheckpointEngine) -> None:
    """Write this rank's part of what trains and of the optimizer into a folder; all ranks must call it.

    Args:
        files: writes them, and keeps what fails instead of raising it.

    Raises:
        CheckpointError: DeepSpeed cannot save this engine.
    """
    if engine.zero_nvme_offload_optimizer():
        raise CheckpointError(
            "a checkpoint: must hold the optimizer's states; got some that lie on a disk, which DeepSpeed does not "
            "save. Pass disable_ds_ckpt, or offload to CPU memory."
        )
    engine.checkpoint_engine = files
    # DeepSpeed would copy two scripts of its own here, and raise on only one rank when the disk is full.
    engine._copy_recovery_script = lambda save_path: None
    engine.save_checkpoint(
        str(folder.parent),
        tag=folder.name,
        client_state=client_state(engine),
        save_latest=False,
        exclude_frozen_parameters=True,
    )


def load_engine(engine: Any, folder: Path, updates: int) -> None:
    """Put a checkpoint into an engine of any ZeRO stage on any number of ranks.

    Args:
        updates: how many the optimizer had made.

    Raises:
        CheckpointError: it holds other parameters than those that are trained.
    """
    load_parameters(engine, read_parameters(folder), updates)
