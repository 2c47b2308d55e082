"""The most memory that a training run on this CPU takes, as the system counts it."""

import ctypes
import functools
import gc
from pathlib import Path
from typing import Any

import transformers

from tests.tiny import TokenRowList, make_trainer, quiet_args, tiny_llama

M_MMAP_THRESHOLD = -3  # of mallopt
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def small_llama() -> transformers.PreTrainedModel:
    """Return a Llama of 20M parameters: large beside what a process takes for other things."""
    shape = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024}
    return tiny_llama(**shape)


def resident(name: str) -> int:
    """Return a line of the process's status in bytes: VmRSS, what is resident, or VmHWM, the most since `forget`."""
    return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(name))


def forget() -> None:
    """Let VmHWM begin again."""
    CLEAR.write_text("5")


def peak_of_training(folder: Path, rows: TokenRowList, settings: dict[str, Any], *, with_holes: bool = False) -> int:
    """Return the bytes that two steps took at the most, beyond what the process had before there was a model.

    Args:
        with_holes: with those of the heap as it is by default. Else blocks of 64 KiB and more are handed back to the
            system when they are freed, so that the count is of what lives.
    """
    if not with_holes:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    tiny = functools.partial(tiny_llama, max_position_embeddings=1024)
    warm = make_trainer(rows, model=tiny, zero_stage=0, batch=len(rows), micro=1, steps=1)[0]
    warm.fit(quiet_args(folder / "warm", 1))
    del warm
    gc.collect()
    before = resident("VmRSS")
    trainer, _ = make_trainer(rows, model=small_llama, **settings)
    gc.collect()
    forget()
    trainer.fit(quiet_args(folder / "run", 2))
    return resident("VmHWM") - before
