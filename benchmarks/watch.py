"""Watches a training run from outside: where the time of its steps goes, and what it computes.

Public methods of the library are wrapped in ones that look at the clock, only in this process.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from openkto.batches.loader import KTODataLoader
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.models import Actor
from openkto.process.stops import StopRequest
from openkto.report.throughput import peak_memory_gib
from openkto.trainer.reference import AdapterReference, CachedReference, ModelReference
from openkto.trainer.reporter import Reporter

PARTS = (
    "matched forward", "backward", "mismatched forward", "reference", "optimizer", "data", "communication", "the rest",
)  # fmt: skip


class StepWatch:
    """Records of each step its seconds and when it ended, the seconds of its parts, its useful work and its tokens.

    A part inside another counts once, as the inner one. A step is timed from the report of the one before to its own;
    the first, from the end of the start-up.

    Args:
        around: contexts by the numbers of the steps, from 2, that run in them, such as torch's counter of FLOPs.
        with_parts: whether to look at the clock around the parts; on a GPU that waits for it each time.
        clock: returns seconds.
        between: called after each step, in no step's time.
    """

    def __init__(
        self,
        around: dict[int, AbstractContextManager[Any]] | None = None,
        *,
        with_parts: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        between: Callable[[], None] | None = None,
    ) -> None:
        self.clock = clock
        self.between = between
        self.around = around or {}
        self.steps: list[dict[str, Any]] = []
        self.batch_seconds: list[float] = []  # the processor's, for planning and laying out each global batch
        self._last = 0.0
        self._parts: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = 0.0
        if with_parts:
            self._watch_parts()
        self._watch_steps()

    def _watch_parts(self) -> None:
        self._time(Actor, "forward", self._name_of_forward)
        self._time(DeepspeedStrategy, "backward", lambda: "backward")
        self._time(DeepspeedStrategy, "step", lambda: "optimizer")
        for method in ("all_reduce", "gather_rows"):
            self._time(DeepspeedStrategy, method, lambda: "communication")
        for reference in (CachedReference, ModelReference, AdapterReference):
            self._time(reference, "log_probs", lambda: "reference")
        iterate = KTODataLoader.__iter__

        def timed_iteration(loader: KTODataLoader) -> Iterator[Any]:
            batches = iter(iterate(loader))
            while True:
                with self.part("data"):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch

        KTODataLoader.__iter__ = timed_iteration  # type: ignore[method-assign]
        make_batch = KTODataLoader.make_batch

        def timed_batch(loader: KTODataLoader, index_N: Any) -> Any:
            started = time.thread_time()  # a thread of its own, beside the step before
            batch = make_batch(loader, index_N)
            self.batch_seconds.append(time.thread_time() - started)
            return batch

        KTODataLoader.make_batch = timed_batch  # type: ignore[method-assign]

    def _name_of_forward(self) -> str:
        if torch.is_grad_enabled():
            return "matched forward"
        return "reference" if "reference" in self._open else "mismatched forward"

    def _watch_steps(self) -> None:
        begin_training, end_step = StopRequest.begin_training, Reporter.step
        inside = ExitStack()

        def begin(stop: StopRequest, *values: Any, **named: Any) -> None:
            begin_training(stop, *values, **named)
            self._last = self.clock()
            self._parts.clear()

        def step(reporter: Reporter, batch: Any, report: Any, *values: Any, **named: Any) -> None:
            inside.close()
            end_step(reporter, batch, report, *values, **named)
            self._end(reporter.work.of(batch), report)
            following = len(self.steps) + 1
            if following in self.around:
                inside.enter_context(self.around[following])

        StopRequest.begin_training = begin  # type: ignore[method-assign]
        Reporter.step = step  # type: ignore[method-assign]

    def _end(self, useful_flops: float, report: Any) -> None:
        _wait_for_gpu()
        now = self.clock()
        seconds = now - self._last
        self.steps.append(
            {
                "seconds": seconds,
                "ended": now,
                "parts": dict(self._parts) | {"the rest": seconds - sum(self._parts.values())},
                "useful_flops": useful_flops,
                "rows": report.counts.rows,
                "tokens": report.counts.matched_tokens,
                "peak_gib": peak_memory_gib(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
                "padding": 1 - (report.counts.matched_tokens + report.counts.mismatched_tokens) / report.counts.slots,
            }
        )
        if self.between is not None:
            self.between()
        self._parts.clear()
        self._last = self.clock()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds inside under this name, those of a part inside it left out."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        _wait_for_gpu()
        now = self.clock()
        if self._open:
            self._parts[self._open[-1]] += now - self._since
        self._since = now

    def _time(self, owner: type, method: str, name: Callable[[], str]) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def timed(*values: Any, **named: Any) -> Any:
            with self.part(name()):
                return original(*values, **named)

        setattr(owner, method, timed)


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
