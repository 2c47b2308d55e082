"""The machine that a run is planned for: ranks, bytes for each, and the rate at which one computes."""

import time
from dataclasses import dataclass

import torch

from openkto.distributed.free_memory import free_memory
from openkto.errors import ConfigError
from openkto.models.onednn import linear
from openkto.planning.activations import Device
from openkto.report.throughput import device_peak_flops

GIB = 2**30
# Of the rate of a CPU's matrix products, what a step reaches: 59 to 66% of it were measured (benchmarks/RESULTS.md).
OF_PRODUCTS = 0.6
# Assumed, not measured: of the peak on a GPU's data sheet, what a step reaches.
OF_PEAK = 0.4


@dataclass(frozen=True)
class Machine:
    """Where a run is planned for.

    Args:
        room: bytes for each rank.
        rate: FLOP/s of one rank, or None where nothing is known of it.
        rate_is: says where the rate is from.
    """

    device: Device
    ranks: int
    room: float
    rate: float | None
    rate_is: str


def find_machine(gpus: int | None, gpu_memory: float | None, tflops: float | None) -> Machine:
    """Return the machine that is asked for, or this one as far as it is not.

    Args:
        gpu_memory: GiB of one GPU.
        tflops: of one rank, 1e12 FLOP/s.

    Raises:
        ConfigError: GPUs are asked for without their memory, and there is none here to look at.
    """
    is_here = torch.cuda.is_available()
    rate, rate_is = (None, "") if tflops is None else (tflops * 1e12, "given with --tflops")
    if gpus is None and gpu_memory is None and not is_here:
        if rate is None:
            rate, rate_is = (
                OF_PRODUCTS * product_rate(),
                f"{OF_PRODUCTS:.0%} of what this CPU's matrix products reach now",
            )
        return Machine("cpu", 1, free_memory(), rate, rate_is)
    if gpu_memory is None and not is_here:
        raise ConfigError(
            f"--gpu_memory: is needed with --gpus where there is no GPU to look at; got none for {gpus} GPUs. "
            "Give the memory of one in GiB, such as 80."
        )
    room = gpu_memory * GIB if gpu_memory is not None else float(torch.cuda.mem_get_info()[1])
    ranks = gpus if gpus is not None else max(torch.cuda.device_count(), 1)
    peak = device_peak_flops(torch.device("cuda")) if is_here else None
    if rate is None and peak is not None:
        rate, rate_is = OF_PEAK * peak, f"assumed: {OF_PEAK:.0%} of the peak on this GPU's data sheet"
    return Machine("cuda", ranks, room, rate, rate_is)


def product_rate(seconds: float = 0.3) -> float:
    """Return the FLOP/s of float32 products of middling size on this CPU, at their best within this time."""
    left, right = torch.rand(1024, 1024), torch.rand(1024, 1024)
    linear(left, right)
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        linear(left, right)
        best = max(best, 2 * 1024**3 / (time.perf_counter() - started))
    return best
