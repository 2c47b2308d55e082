"""Checkpoints: saved by all ranks together, complete or not there, and chosen by all ranks together.

DeepSpeed writes its own files (`engine.save_checkpoint`), sharded as training is. Beside them lie what the trainer
needs to go on exactly. A failure to write is no reason to end a run: the checkpoint before is still there.
"""

import contextlib
import json
import logging
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors.numpy
import safetensors.torch
from torch import nn

from openkto.distributed import checkpoint_folder as layout
from openkto.distributed.agreement import Ranks, first_problem, reason_of
from openkto.distributed.choosing import Found, choose
from openkto.distributed.engine_files import RecordingCheckpointEngine
from openkto.distributed.manifest import ARRAYS, REFERENCE, STATE, write_manifest
from openkto.distributed.moving_reference import load_reference, reference_weights
from openkto.errors import CheckpointError, ConfigError
from openkto.files import delete, flush_files, flush_to_disk

log = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 3

Arrays = dict[str, np.ndarray]


class KeepsEngine(Ranks, Protocol):
    """What checkpoints ask of a strategy; `DeepspeedStrategy` is one."""

    def save_engine(self, engine: Any, folder: Path, files: RecordingCheckpointEngine) -> None: ...

    def load_engine(self, engine: Any, folder: Path, updates: int) -> None: ...


class Checkpoints:
    """A run's checkpoints under one folder, which all ranks must see.

    Args:
        root: the folder.
        strategy: of the run.
        max_number, max_gigabytes: older checkpoints go when there are more; see `checkpoint_folder.rotate`.
        with_engine: whether to write DeepSpeed's files; without them nothing can be resumed.
    """

    def __init__(
        self,
        root: str | Path,
        strategy: KeepsEngine,
        *,
        max_number: int = 3,
        max_gigabytes: float = 1e8,
        with_engine: bool = True,
    ) -> None:
        self.root, self.strategy = Path(root), strategy
        self.max_number, self.max_gigabytes = max_number, max_gigabytes
        self.with_engine = with_engine
        self.failures = 0
        self.saved_step: int | None = None
        self._chosen: tuple[bool | str | None, Found | None] | None = None

    # ---- before the first step --------------------------------------------------------------------------------------

    def make_folder(self) -> None:
        """Make the folder and see that all ranks share it; all ranks must call it.

        Raises:
            ConfigError: they do not, or it cannot be written.
        """
        token = self.strategy.gather_objects(uuid.uuid4().hex)[0]
        probe = self.root / f"{layout.PROBE}{token}"
        made = first_problem(self.strategy, reason_of(lambda: self._make(probe)) if self.strategy.rank == 0 else None)
        seen = first_problem(self.strategy, None if probe.exists() else f"rank {self.strategy.rank} does not see it")
        if self.strategy.rank == 0:
            with contextlib.suppress(OSError):
                probe.unlink()
        if made is not None:
            raise ConfigError(
                f"--ckpt_path: must be a folder that can be written; got {self.root} ({made}). Name another."
            )
        if seen is not None:
            raise ConfigError(
                f"--ckpt_path: must be a folder that all ranks share; got {self.root}, and {seen}. Name one on a "
                "shared disk, or pass --disable_ds_ckpt."
            )

    def _make(self, probe: Path) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        layout.clear(self.root)  # the free space is counted without it
        probe.touch()

    def check_space(self, bytes_needed: int) -> None:
        """Compare the free space with what will be written there, hours later; all ranks must call it.

        Raises:
            ConfigError: it would not fit now.
        """
        free = self.strategy.gather_objects(shutil.disk_usage(self.root).free)[0]
        if free < bytes_needed:
            raise ConfigError(
                f"--ckpt_path: a checkpoint, and what else is written there, needs {bytes_needed / 2**20:.0f} MiB; got "
                f"{self.root} with {free / 2**20:.0f} MiB free. Free some space, name another folder, or pass "
                "--disable_ds_ckpt."
            )

    def start_afresh(self) -> None:
        """Let a new run begin: an earlier run's checkpoints are moved aside; all ranks must call it."""
        if self.strategy.rank == 0:
            place = layout.set_aside(self.root)
            if place is not None:
                log.info("%s: an earlier run's checkpoints are kept in %s", self.root, place)
        self.strategy.gather_objects(None)

    # ---- choosing ---------------------------------------------------------------------------------------------------

    def choose(self, wanted: bool | str | None) -> Found | None:
        """Return the checkpoint to resume from, the same on every rank; all ranks must call it.

        See `choosing.choose`. Where the run's own newest one is chosen, `latest` and `best` are made to say so.
        """
        if not wanted:
            return None
        if self._chosen is not None and self._chosen[0] == wanted:
            return self._chosen[1]
        found = choose(self.root, self.strategy, wanted)
        self._chosen = (wanted, found)
        if found is not None and not isinstance(wanted, str) and self.strategy.rank == 0:
            self._correct_pointers(found.folder.name, found.state["run"]["best_step"])
        return found

    def load(self, engine: Any, found: Found, moving_reference: nn.Module | None = None) -> Arrays:
        """Put a checkpoint into an engine of any ZeRO stage on any number of ranks; return its arrays.

        Args:
            moving_reference: given its weights too.

        Raises:
            CheckpointError: it holds other parameters than those that are trained.
        """
        self.strategy.load_engine(engine, found.folder, found.state["updates"])
        if moving_reference is not None:
            load_reference(moving_reference, found.folder / REFERENCE)
        return safetensors.numpy.load_file(found.folder / ARRAYS)

    def load_step(self, engine: Any, step: int) -> None:
        """Put the run's own checkpoint of a step into an engine; all ranks must call it.

        Raises:
            CheckpointError: it is not there, or not as it was written.
        """
        found = choose(self.root, self.strategy, str(self.root / layout.name_of(step)))
        assert found is not None, "a path is found or refused"
        self.load(engine, found)

    def mark_best(self, step: int) -> None:
        """Let `best` name the checkpoint of a step that is saved already."""
        if self.strategy.rank == 0 and self.with_engine:
            self._correct_pointers(layout.name_of(step), step)

    def _correct_pointers(self, latest: str | None, best_step: int) -> None:
        try:
            layout.correct_pointers(self.root, latest, best_step)
        except OSError as error:
            log.warning(
                "warning: latest, best: could not be written (%s); nothing else is lost, and the next save or start "
                "writes them again.",
                error.strerror,
            )

    # ---- the end of a run -------------------------------------------------------------------------------------------

    def mark_finished(self, step: int, folder: Path, files: dict[str, int]) -> None:
        """Say that the run whose last checkpoint is that step's is done, once all of its folder is on the disk.

        Args:
            folder: of the model and the records.
            files: the model's, with their sizes in bytes.
        """
        if self.strategy.rank == 0 and self.with_engine and self.saved_step == step:
            try:
                flush_files(folder)
                layout.point_to(self.root, "finished", layout.name_of(step), json.dumps(files))
            except OSError as error:
                log.warning(
                    "warning: finished: could not be written (%s); the same command would save the model once more.",
                    error.strerror,
                )

    def is_finished(self, found: Found) -> bool:
        """Whether the run of a checkpoint was done with it, as rank 0 sees it."""
        finished = self.strategy.gather_objects(layout.pointed_to(found.folder.parent, "finished"))[0]
        return bool(finished == found.folder.name)

    def finished_files(self, found: Found) -> dict[str, int] | None:
        """Return the model's files that `mark_finished` was given; None where an older version wrote none down."""
        return layout.finished_files(found.folder.parent)

    # ---- saving -----------------------------------------------------------------------------------------------------

    def save(
        self,
        engine: Any,
        step: int,
        state: dict[str, Any],
        arrays: Arrays,
        *,
        moving_reference: nn.Module | None = None,
        write_copy: Callable[[str], None] | None = None,
        best_step: int = -1,
    ) -> bool:
        """Write a step's checkpoint; return whether it is complete. All ranks must call it.

        Args:
            state: what JSON holds; see `state_file.NEEDED` for what must be in it to be resumed.
            arrays: what is larger.
            moving_reference: a reference whose weights are not those of `--ref_pretrain` any more.
            write_copy: writes the model as a Hugging Face folder; every rank calls it.
            best_step: the step so far whose checkpoint `best` names, and which is kept; negative for none.

        Raises:
            CheckpointError: it failed for the third time in a row.
        """
        started, name = time.perf_counter(), layout.name_of(step)
        failure = self._save_as(name, engine, state, arrays, moving_reference, write_copy)
        if failure is not None:
            self._give_up(name, failure)
            return False
        if self.strategy.rank == 0:
            self._tidy(name, best_step)
        self.failures, self.saved_step = 0, step
        log.debug("checkpoint %s: saved in %.1f s", name, time.perf_counter() - started)
        return True

    def save_before_failed_step(
        self, engine: Any, step: int, state: dict[str, Any], arrays: Arrays, moving_reference: nn.Module | None
    ) -> None:
        """Write the state before a step that failed, where only `--load_checkpoint PATH` finds it; see `save`.

        What fails here is a warning: the run ends anyway.
        """
        name = f"{layout.BEFORE_FAILED}{step}"
        failure = self._save_as(name, engine, state, arrays, moving_reference, None)
        if self.strategy.rank == 0:
            reason_of(lambda: layout.clear(self.root))
            if failure is None:
                log.warning("warning: %s has the state before the step that failed.", self.root / name)
            else:
                log.warning("warning: checkpoint %s: was not saved (%s).", name, failure)

    def _save_as(
        self,
        name: str,
        engine: Any,
        state: dict[str, Any],
        arrays: Arrays,
        moving_reference: nn.Module | None,
        write_copy: Callable[[str], None] | None,
    ) -> str | None:
        """Write all of a checkpoint under a scratch name, then give it its own; return what failed, on any rank."""
        scratch, is_first = self.root / layout.SCRATCH, self.strategy.rank == 0
        failure = first_problem(self.strategy, reason_of(lambda: self._clear(scratch / name)) if is_first else None)
        if failure is None and self.with_engine:
            failure = self._write(engine, scratch / name, state, arrays, moving_reference)
        if failure is None and write_copy is not None:
            copy = scratch / f"{name}{layout.HF_SUFFIX}"
            failure = first_problem(self.strategy, reason_of(lambda: write_copy(str(copy))))
        if failure is None:
            failure = first_problem(self.strategy, reason_of(lambda: self._put_in_place(name)) if is_first else None)
        return failure

    def _clear(self, folder: Path) -> None:
        layout.clear(self.root)
        folder.mkdir(parents=True)

    def _write(
        self, engine: Any, folder: Path, state: dict[str, Any], arrays: Arrays, moving_reference: nn.Module | None
    ) -> str | None:
        recorder = RecordingCheckpointEngine()
        self.strategy.save_engine(engine, folder, recorder)
        weights = {} if moving_reference is None else reference_weights(moving_reference)
        if weights:
            recorder.write_path(folder / REFERENCE, lambda path: safetensors.torch.save_file(weights, path))
        if self.strategy.rank == 0:
            text = json.dumps(state, indent=1).encode()
            recorder.write(folder / STATE, lambda file: file.write(text))
            recorder.write(folder / ARRAYS, lambda file: file.write(safetensors.numpy.save(arrays)))
        gathered = self.strategy.gather_objects((recorder.failure, recorder.files))
        failure = next((found for found, _ in gathered if found is not None), None)
        if failure is None and self.strategy.rank == 0:
            files = {name: record for _, written in gathered for name, record in written.items()}
            failure = reason_of(lambda: write_manifest(folder, files, layout.next_time(self.root)))
        return first_problem(self.strategy, failure)

    def _put_in_place(self, name: str) -> None:
        copy = self.root / layout.SCRATCH / f"{name}{layout.HF_SUFFIX}"
        if copy.exists():
            layout.put_in_place(copy, self.root / copy.name)
        if self.with_engine:
            layout.put_in_place(self.root / layout.SCRATCH / name, self.root / name)

    def _tidy(self, name: str, best_step: int) -> None:
        """Do what follows a checkpoint that has its name: nothing here can fail it any more."""
        try:
            flush_to_disk(self.root)
        except OSError as error:
            log.warning("warning: checkpoint %s: may not survive a power cut (%s).", name, error.strerror)
        self._correct_pointers(name if self.with_engine else None, best_step)
        try:
            deleted = layout.rotate(self.root, name, self.max_number, self.max_gigabytes, best_step)
        except OSError as error:
            log.warning("warning: checkpoints: could not be counted (%s); none was deleted.", error.strerror)
            deleted = []
        delete(self.root / layout.SCRATCH)
        if deleted:
            log.debug("checkpoints: deleted %s", ", ".join(deleted))

    def _give_up(self, name: str, failure: str) -> None:
        """Delete what was written, and say so; the checkpoint before is untouched."""
        if self.strategy.rank == 0:
            reason_of(lambda: layout.clear(self.root))
        self.failures += 1
        if self.failures == FAILURES_IN_A_ROW:
            raise CheckpointError(
                f"{self.root}: must take a checkpoint; got {failure}, for the {FAILURES_IN_A_ROW}rd time in a row. "
                "Free some space or name another --ckpt_path, and start the same command again."
            )
        if self.strategy.rank == 0:
            log.warning("warning: checkpoint %s: was not saved (%s); training continues.", name, failure)
