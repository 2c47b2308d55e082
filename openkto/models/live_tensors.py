"""Counts the bytes of the tensors that a computation makes, on any device, while they live."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Adds up the tensors that live, except those that were there before."""

    def __init__(self, before: list[Tensor]) -> None:
        super().__init__()
        self.bytes = self.kept = self.peak = 0
        self.peaks: dict[str, int] = {}  # of each phase
        self.known = {tensor.untyped_storage()._cdata for tensor in before}
        self.before = before  # kept: their places must not be taken by others

    def end_phase(self, name: str) -> None:
        self.peaks[name] = max(self.peaks.get(name, 0), self.peak)
        self.peak = self.bytes

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self.known:
            return
        self.known.add(place)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._gone, place, size).atexit = False

    def _gone(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.bytes -= size
