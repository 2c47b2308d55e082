"""Speed of a run: rows and tokens per second, MFU, peak memory."""

import resource
import sys
from dataclasses import dataclass, field

import torch

# Dense bfloat16 FLOP/s of one device, from the makers' data sheets; other devices report no mfu.
PEAK_FLOPS = {
    "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "B200": 2250e12, "A100": 312e12,
    "A800": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12, "V100": 125e12,
}  # fmt: skip


@dataclass(frozen=True)
class StepCounts:
    """One step's size over all ranks."""

    rows: int
    matched_tokens: int
    mismatched_tokens: int
    slots: int  # tokens with padding, matched and mismatched
    same_prompt: int
    same_completion: int


@dataclass
class Throughput:
    """Adds up steps and their time, evaluation and saving left out."""

    world_size: int
    device: torch.device
    seconds: float = 0.0
    flops: float = 0.0  # of useful work on this rank
    steps: list[StepCounts] = field(default_factory=list)

    def add(self, counts: StepCounts, seconds: float, flops: float) -> None:
        """Take one step in, with the useful work that it was on this rank."""
        self.steps.append(counts)
        self.seconds += seconds
        self.flops += flops

    def values(self, flops: float) -> dict[str, float]:
        """Return the rates since the last reset; tokens are those of the matched rows.

        Args:
            flops: the useful work of all ranks.
        """
        matched = sum(s.matched_tokens for s in self.steps)
        mismatched = sum(s.mismatched_tokens for s in self.steps)
        slots = sum(s.slots for s in self.steps)
        values = {
            "samples_per_second": sum(s.rows for s in self.steps) / self.seconds,
            "tokens_per_second": matched / self.seconds,
            "padding_fraction": 1 - (matched + mismatched) / slots,
            "step_time_s": self.seconds / len(self.steps),
        }
        peak = device_peak_flops(self.device)
        if peak is not None:
            values["mfu"] = flops / self.seconds / (peak * self.world_size)
        return values

    def reset(self) -> None:
        """Start the next window."""
        self.steps.clear()
        self.seconds = self.flops = 0.0


def device_peak_flops(device: torch.device) -> float | None:
    """Return the device's peak in FLOP/s, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Return this process's highest memory so far in GiB: of the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
