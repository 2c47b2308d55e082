"""The reference's log-probabilities of a whole run, computed before it starts and kept on disk for the next one.

Shapes:  B = rows in a micro-batch, P = pairs, S = pairs in the sample, C = columns.
Units:   nats.
"""

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from openkto.batches.batch import IntArray
from openkto.batches.loader import KTODataLoader
from openkto.batches.micro_batch import MicroBatch, cut_pairs
from openkto.batches.pairs import batch_keys, pairs_of_run, sequence_key
from openkto.data.log_prob_files import Values, make_folder, read_named, read_parts, write_part
from openkto.distributed.agreement import on_some_ranks
from openkto.errors import ConfigError, StopError, TrainingError
from openkto.process.stops import StopRequest
from openkto.trainer.forwards import is_real
from openkto.trainer.protocols import Strategy
from openkto.trainer.reference import CachedReference, ModelReference

log = logging.getLogger(__name__)

SECONDS_A_PART = 60.0  # what a kill may cost, about
MICRO_BATCHES_A_TURN = 8  # between two exchanges of what the ranks have computed
PAIRS_TO_CHECK = 32  # of each data set
# How far a value and the model's may be apart: what other shapes of micro-batches make of round-off, with room.
RELATIVE_TOLERANCE = 1e-6
TOLERANCE_A_TOKEN = {"fp32": 1e-5, "bf16": 0.1, "fp16": 0.03}


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
        ConfigError: the folder cannot be read, or is not the same on every rank.
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
        self.missing: list[IntArray] = []  # of them, those without a value

    def look_up(self) -> None:
        """Find out what the run needs, and what of it is missing."""
        self.needed = [pairs_of_run(loader, self.total_steps if loader.shuffle else 1) for loader in self.loaders]
        self.missing = [self._find_missing(*needed) for needed in zip(self.loaders, self.needed, strict=True)]

    @property
    def num_needed(self) -> int:
        """The pairs of the run."""
        return sum(map(len, self.needed))

    @property
    def num_missing(self) -> int:
        """Of them, those without a value."""
        return sum(map(len, self.missing))

    @property
    def num_forwards(self) -> int:
        """The most rows that `check` and `fill` may run."""
        found = (len(needed) - len(missing) for needed, missing in zip(self.needed, self.missing, strict=True))
        return self.num_missing + sum(min(PAIRS_TO_CHECK, count) for count in found)

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
            raise ConfigError(
                f"--ref_cache_dir: must be a folder that all nodes share; got {self.folder}, where rank {lacking[0]} "
                "finds other files than rank 0. Name one that is, or start again if another run was writing it."
            )
        return own

    def _find_missing(self, loader: KTODataLoader, needed_P2: IntArray) -> IntArray:
        """Return the pairs without a value, one of those of the same tokens, each rank having looked at its share."""
        lacking: list[tuple[float, float, float, float]] = []
        for pair in needed_P2[self.strategy.data_rank :: self.strategy.data_size]:
            key = sequence_key(*cut_pairs(loader.dataset, pair[None])[0])
            if key not in self.values:
                # 96 bits of the key, as two whole numbers that float64 holds.
                halves = int.from_bytes(key[:6], "big"), int.from_bytes(key[6:12], "big")
                lacking.append((float(pair[0]), float(pair[1]), float(halves[0]), float(halves[1])))
        own_PC = torch.tensor(lacking, dtype=torch.float64, device=self.strategy.device).reshape(-1, 4)
        found_PC = self.strategy.gather_rows(own_PC)
        _, first_P = np.unique(found_PC[:, 2:], axis=0, return_index=True)
        return found_PC[np.sort(first_P), :2].astype(np.int64)

    # ---- computing --------------------------------------------------------------------------------------------------

    def fill(self, model: Any, between: Callable[[], None], stop: StopRequest) -> None:
        """Compute what is missing, and keep it at once: a run that is killed resumes from there.

        Args:
            model: the frozen reference, from `strategy.prepare_frozen`.
            between: called before each forward, as often on every rank.
            stop: asked whenever values are exchanged, and acted on by all ranks together.

        Raises:
            StopError: any rank was asked to stop.
            TrainingError: a log-probability is not finite.
            ConfigError: the folder cannot be written.
        """
        if self.num_missing == 0:
            return
        on_some_ranks(self.strategy, lambda: make_folder(self.folder), is_mine=self.strategy.rank == 0)
        writer = _Writer(self.folder, self.about, is_first=self.strategy.rank == 0)
        try:
            for loader, pairs_P2 in zip(self.loaders, self.missing, strict=True):
                planned = loader.plan_pairs(pairs_P2)
                for start in range(0, len(planned.plan), MICRO_BATCHES_A_TURN):
                    turn = planned._replace(plan=planned.plan[start : start + MICRO_BATCHES_A_TURN])
                    batches = loader.of_rank(pairs_P2, turn)
                    writer.add(self._exchange(model, batches, between, writer.failure))
                    self._stop_if_asked(stop)
        finally:
            # Not a collective: what is known is kept whatever ends the filling.
            writer.write()
        self._raise_failure(self.strategy.gather_objects(writer.failure))
        self.missing = [pairs_P2[:0] for pairs_P2 in self.missing]

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
        new = _together(values for values, _, _ in gathered)
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
                raise ConfigError(failure)

    def check(self, model: Any, between: Callable[[], None]) -> None:
        """Compare a sample of the values that were read with the model's, before `fill` adds to them.

        Raises:
            ConfigError: they are not this model's.
        """
        found_SC = np.zeros((0, 4))
        for loader, needed_P2 in zip(self.loaders, self.needed, strict=True):
            pairs_S2 = self._sample(loader, needed_P2)
            if len(pairs_S2):
                found_SC = np.concatenate([found_SC, self._compare(model, loader, pairs_S2, between)])
        if not len(found_SC):
            return
        row_S, cached_S, fresh_S, tokens_S = found_SC.T
        apart_S = np.abs(cached_S - fresh_S)
        allowed_S = TOLERANCE_A_TOKEN[self.strategy.precision] * tokens_S + RELATIVE_TOLERANCE * np.abs(fresh_S)
        bad_S = ~(apart_S <= allowed_S)
        if bad_S.any():
            worst = int(np.argmax(apart_S / allowed_S))
            raise ConfigError(
                f"--ref_cache_dir {self.folder}: its log-probabilities must be the reference model's; got "
                f"{cached_S[worst]:.6g} nats where the model gives {fresh_S[worst]:.6g} (row {int(row_S[worst])}), and "
                f"{int(bad_S.sum())} of {len(bad_S)} checked are off. Delete that folder to compute them again."
            )
        log.info(
            "reference: %d cached values checked: at most %.2g nats, %.2g a token, from the model's in %s",
            len(apart_S),
            apart_S.max(),
            (apart_S / tokens_S).max(),
            self.strategy.precision,
        )

    def _sample(self, loader: KTODataLoader, needed_P2: IntArray) -> IntArray:
        """Return pairs whose value was read, spread over the data set; the same on every rank, as the values are."""
        spread_P = np.random.default_rng(loader.seed).permutation(len(needed_P2))
        pairs: list[IntArray] = []
        for p in spread_P:
            if len(pairs) == PAIRS_TO_CHECK:
                break
            if sequence_key(*cut_pairs(loader.dataset, needed_P2[[p]])[0]) in self.values:
                pairs.append(needed_P2[p])
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def _compare(
        self, model: Any, loader: KTODataLoader, pairs_S2: IntArray, between: Callable[[], None]
    ) -> np.ndarray:
        """Return (row, value, the model's, scored tokens) of these pairs, the same on every rank."""
        batches = loader.of_rank(pairs_S2, loader.plan_pairs(pairs_S2))
        fresh = ModelReference(model, self.strategy).log_probs(batches, between)
        parts = []
        for batch, fresh_B, cached_B in zip(
            batches, fresh, CachedReference(self.values, torch.device("cpu")).log_probs(batches, between), strict=True
        ):
            columns = (batch["row"], cached_B, fresh_B.cpu(), batch["loss_mask"].sum(1))
            parts.append(torch.stack([column.double() for column in columns], dim=1)[is_real(batch)])
        return self.strategy.gather_rows(torch.cat(parts).to(self.strategy.device))


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
            except ConfigError as error:
                self.failure = str(error)
            self.written += len(self.values)
        self.values, self.last = {}, time.monotonic()
