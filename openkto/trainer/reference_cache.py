"""The reference's log-probabilities of a whole run, computed before it starts and kept on disk for the next one.

Shapes:  B = rows in a micro-batch, P = pairs, C = columns.
Units:   nats.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from openkto.batches.batch import IntArray
from openkto.batches.loader import KTODataLoader
from openkto.batches.micro_batch import MicroBatch, cut_pairs
from openkto.batches.pairs import batch_keys, pairs_of_run, sequence_key
from openkto.data.log_prob_files import (
    SHORT_KEY_BYTES,
    Values,
    delete_begun,
    make_folder,
    read_begun,
    read_named,
    read_parts,
    write_begun,
    write_part,
)
from openkto.distributed.agreement import on_some_ranks
from openkto.errors import CacheError, StopError, TrainingError
from openkto.process.stops import StopRequest
from openkto.trainer.forwards import is_real
from openkto.trainer.protocols import Strategy
from openkto.trainer.reference import CachedReference, ModelReference

log = logging.getLogger(__name__)

SECONDS_A_PART = 60.0  # what a kill may cost, about
MICRO_BATCHES_A_TURN = 8  # between two exchanges of what the ranks have computed


class CacheStrategy(Strategy, Protocol):
    """What the cache asks of a strategy beyond forwards; `DeepspeedStrategy` is one."""

    precision: Any

    def gather_objects(self, value: Any) -> list[Any]: ...


class ReferenceCache:
    """What a run needs of its reference, what of it is in a folder, and how to make the rest. All ranks call all of it.

    Args:
        folder: only of this reference model; the first rank writes it, all read it.
        about: what the values are of, written beside them.
        loaders: of the training rows and of each evaluation set.
        total_steps: of the training run.

    Raises:
        CacheError: the folder cannot be read, or is not the same on every rank.
    """

    def __init__(
        self,
        folder: Path,
        about: dict[str, Any],
        strategy: CacheStrategy,
        loaders: list[KTODataLoader],
        total_steps: int,
    ) -> None:
        self.folder, self.about, self.strategy, self.loaders = folder, about, strategy, loaders
        self.total_steps = total_steps
        self.values = self._read()
        self.needed: list[IntArray] = []  # of each loader, [P, 2], whose prompt and whose completion
        self.missing: list[_Todo] = []  # of them, those without a value

    def look_up(self) -> None:
        """Find out what the run needs, and what of it is missing."""
        self.needed = [pairs_of_run(loader, self.total_steps if loader.shuffle else 1) for loader in self.loaders]
        self.missing = self._find(set())

    @property
    def num_needed(self) -> int:
        """The pairs of the run."""
        return sum(map(len, self.needed))

    @property
    def num_missing(self) -> int:
        """Of them, those without a value."""
        return sum(len(missing.pairs_P2) for missing in self.missing)

    def reference(self) -> CachedReference:
        """Return the reference that answers from the values."""
        assert self.num_missing == 0, "the cache is filled before a run starts"
        return CachedReference(self.values, self.strategy.device)

    def _read(self) -> Values:
        is_first = self.strategy.rank == 0
        parts = on_some_ranks(self.strategy, lambda: read_parts(self.folder), is_mine=is_first)
        names = self.strategy.gather_objects(list(parts or ()))[0]
        own = read_named(self.folder, names) if parts is None else _together(parts.values())
        lacking = [rank for rank, lacks in enumerate(self.strategy.gather_objects(own is None)) if lacks]
        if own is None or lacking:
            raise CacheError(
                f"--ref_cache_dir: must be a folder that all nodes share; got {self.folder}, where rank {lacking[0]} "
                "finds other files than rank 0. Name one that is, or start again if another run was writing it."
            )
        return own

    def _find(self, begun: set[bytes]) -> "list[_Todo]":
        """Return each loader's pairs without a value or with one of these short keys, one of those of the same tokens.

        Each rank looks at its share.
        """
        found = []
        for loader, needed_P2 in zip(self.loaders, self.needed, strict=True):
            own: list[tuple[float, ...]] = []
            for pair in needed_P2[self.strategy.data_rank :: self.strategy.data_size]:
                key = sequence_key(*cut_pairs(loader.dataset, pair[None])[0])
                if key not in self.values or key[:SHORT_KEY_BYTES] in begun:
                    # 96 bits of the key, as two whole numbers that float64 holds.
                    halves = (int.from_bytes(key[i : i + 6], "big") for i in (0, 6))
                    own.append((*map(float, (*pair, *halves, key not in self.values)),))
            own_PC = torch.tensor(own, dtype=torch.float64, device=self.strategy.device).reshape(-1, 5)
            found_PC = self.strategy.gather_rows(own_PC)
            _, first_P = np.unique(found_PC[:, 2:4], axis=0, return_index=True)
            all_PC = found_PC[np.sort(first_P)].astype(np.int64)
            found.append(_Todo(all_PC[:, :2], all_PC[:, 2:4], all_PC[:, 4] == 1))
        return found

    # ---- computing --------------------------------------------------------------------------------------------------

    def fill(self, model: Any, between: Callable[[], None], stop: StopRequest) -> None:
        """Compute what is missing, and keep it at once: a run that is killed resumes from there.

        What is computed together decides the last bits. So the next start makes the plan of the one that was killed,
        and runs what of it is not complete.

        Args:
            model: the frozen reference, from `strategy.prepare_frozen`.
            between: called before each forward, as often on every rank.
            stop: asked whenever values are exchanged, and acted on by all ranks together.

        Raises:
            StopError: any rank was asked to stop.
            TrainingError: a log-probability is not finite.
            CacheError: the folder cannot be written.
        """
        if self.num_missing == 0:
            self._end()
            return
        on_some_ranks(self.strategy, lambda: make_folder(self.folder), is_mine=self.strategy.rank == 0)
        writer = _Writer(self.folder, self.about, is_first=self.strategy.rank == 0)
        try:
            for loader, todo in zip(self.loaders, self._begin(), strict=True):
                planned = loader.plan_pairs(todo.pairs_P2)
                left = [shares for shares in planned.plan if todo.lacks_P[np.concatenate(shares)].any()]
                for start in range(0, len(left), MICRO_BATCHES_A_TURN):
                    turn = planned._replace(plan=left[start : start + MICRO_BATCHES_A_TURN])
                    batches = loader.of_rank(todo.pairs_P2, turn)
                    writer.add(self._exchange(model, batches, between, writer.failure))
                    self._stop_if_asked(stop)
        finally:
            # Not a collective: what is known is kept whatever ends the filling.
            writer.write()
        self._raise_failure(self.strategy.gather_objects(writer.failure))
        self.missing = [_Todo(todo.pairs_P2[:0], todo.halves_P2[:0], todo.lacks_P[:0]) for todo in self.missing]
        self._end()

    def _begin(self) -> "list[_Todo]":
        """Return what the plan is to be made of: what was missing when the first start with this plan began."""
        needs, plan, is_first = self._needs(), self._plan(), self.strategy.rank == 0
        known = on_some_ranks(self.strategy, lambda: read_begun(self.folder, needs, plan), is_mine=is_first)
        begun: set[bytes] = self.strategy.gather_objects(known)[0]
        todo = self._find(begun) if begun else self.missing
        keys = [key for one in todo for key in one.short_keys()] if is_first else []
        on_some_ranks(self.strategy, lambda: write_begun(self.folder, needs, plan, keys), is_mine=is_first)
        return todo

    def _end(self) -> None:
        if self.strategy.rank == 0:
            delete_begun(self.folder, self._needs())

    def _needs(self) -> str:
        """Return a name for the pairs of the run."""
        return hashlib.sha256(b"".join(needed_P2.tobytes() for needed_P2 in self.needed)).hexdigest()[:16]

    def _plan(self) -> str:
        """Return a name for what decides which pairs are computed together."""
        limits = [(loader.world_size, loader.max_rows, loader.max_tokens, loader.layout) for loader in self.loaders]
        return hashlib.sha256(repr(limits).encode()).hexdigest()[:16]

    def _exchange(
        self, model: Any, batches: list[MicroBatch], between: Callable[[], None], failure: str | None
    ) -> Values:
        """Return the values of these micro-batches of all ranks, having taken them up."""
        values, rows = _forward(model, self.strategy, batches, between)
        gathered = self.strategy.gather_objects((values, rows, failure))
        self._raise_failure([failure for _, _, failure in gathered])
        broken = sorted({row for _, rows, _ in gathered for row in rows})
        if broken:
            raise TrainingError(
                f"the reference on row {broken[0]} (counted from 0) and {len(broken) - 1} more: every log-probability "
                f"must be finite in {self.strategy.precision}; got nan or infinity. Look at the row, check the model's "
                "weights, or pass --param_dtype fp32."
            )
        # One that is there stays: it was computed with what the plan put it with.
        new = {key: value for values, _, _ in gathered for key, value in values.items() if key not in self.values}
        self.values |= new
        return new

    def _stop_if_asked(self, stop: StopRequest) -> None:
        asked = enumerate(self.strategy.gather_objects(stop.reason if stop.is_due() else None))
        rank, reason = next(((rank, reason) for rank, reason in asked if reason is not None), (0, None))
        if reason is not None:
            raise StopError(
                f"{reason} on rank {rank}: the reference's cache is not complete yet; what was computed is kept in "
                f"{self.folder}. Start the same command again."
            )

    @staticmethod
    def _raise_failure(failures: list[str | None]) -> None:
        for failure in failures:
            if failure is not None:
                raise CacheError(failure)


class _Todo(NamedTuple):
    """Pairs of a loader whose values are to be computed, [P]."""

    pairs_P2: IntArray  # whose prompt and whose completion
    halves_P2: IntArray  # the first 12 bytes of the key, as two whole numbers
    lacks_P: NDArray[np.bool_]  # whether there is no value yet

    def short_keys(self) -> list[bytes]:
        return [b"".join(half.to_bytes(6, "big") for half in halves) for halves in self.halves_P2.tolist()]


def _together(parts: Iterable[Values]) -> Values:
    return {key: value for part in parts for key, value in part.items()}


def _forward(
    model: Any, strategy: CacheStrategy, batches: list[MicroBatch], between: Callable[[], None]
) -> tuple[Values, list[int]]:
    """Return this rank's values by key, and the rows whose value is not finite."""
    values, broken = {}, []
    for batch, log_prob_B in zip(batches, ModelReference(model, strategy).log_probs(batches, between), strict=True):
        for key, row, real, log_prob in zip(
            batch_keys(batch), batch["row"].tolist(), is_real(batch).tolist(), log_prob_B.tolist(), strict=True
        ):
            if real and np.isfinite(log_prob):
                values[key] = log_prob
            elif real:
                broken.append(row)
    return values, broken


class _Writer:
    """Gathers what the first rank is to write, and writes it about once a minute."""

    def __init__(self, folder: Path, about: dict[str, Any], *, is_first: bool) -> None:
        self.folder, self.about, self.is_first = folder, about, is_first
        self.failure: str | None = None  # for the other ranks to hear of
        self.values: Values = {}
        self.written, self.last = 0, time.monotonic()

    def add(self, values: Values) -> None:
        self.values |= values
        if time.monotonic() - self.last >= SECONDS_A_PART:
            self.write()
            log.info("reference: %d values are in %s", self.written, self.folder)

    def write(self) -> None:
        if self.is_first and self.values and self.failure is None:
            try:
                write_part(self.folder, self.about, self.values)
            except CacheError as error:
                self.failure = str(error)
            self.written += len(self.values)
        self.values, self.last = {}, time.monotonic()
