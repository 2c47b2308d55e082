"""FLOPs that a program really computes, as torch counts them: padding, recomputation and unneeded forwards included."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def _addmm(out: Any, left: Any, right: Any, **_: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _product(left: Any, right: Any, bias: Any, **_: Any) -> int:
    return 2 * math.prod(left) * right[0]


def _sdpa(query: Any, key: Any, value: Any, dropout: float = 0.0, is_causal: bool = False, **_: Any) -> float:
    # The kernel leaves out what is above the diagonal where it is told that the mask is causal.
    return sdpa_flop_count(query, key, value) * (0.5 if is_causal else 1.0)


def _sdpa_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, norm: Any, dropout: float, is_causal: bool, **_: Any
) -> float:
    return sdpa_backward_flop_count(grad, query, key, value) * (0.5 if is_causal else 1.0)


@contextmanager
def counter() -> Iterator[FlopCounterMode]:
    """Give a counter that knows the products which torch's own leaves out: a CPU's attention, addmm in place.

    What is compiled runs as it was written meanwhile; no counter sees into it.
    """
    kernel, backward = (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    known: dict[Any, Any] = {aten.addmm_: _addmm, kernel: _sdpa, backward: _sdpa_backward}
    if hasattr(torch.ops.openkto, "product"):  # in a process of ours
        known[torch.ops.openkto.product] = _product
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False, custom_mapping=known) as flops:
        yield flops
