"""The learning rate of each step, as a pure function of the number of updates made."""

import math
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from openkto.errors import ConfigError


def create_scheduler(
    optimizer: Optimizer, name: str, *, total_steps: int, warmup_ratio: float = 0.0, min_lr_ratio: float = 0.1
) -> LambdaLR:
    """Return transformers' schedule of that name; the floor serves the schedules that have one.

    The trainer reads step t's rate, counted from 1, at t: warm-up gives t / warmup_steps, the last step the final
    value, which is 0 with `linear` and the cosines without a floor. A run that is all warm-up ends at the full rate.

    Raises:
        ConfigError: the schedule is not a function of the step.
    """
    warm_up = warmup_steps(name, total_steps, warmup_ratio)
    if name == "cosine_warmup_with_min_lr":
        # Without a rate to begin warm-up at, it is the same curve, but read a step ahead: it would rise at the end.
        name = "cosine_with_min_lr"
    floor: dict[str, dict[str, Any]] = {
        "cosine_with_min_lr": {"min_lr_rate": min_lr_ratio},
        "polynomial": {"lr_end": min_lr_ratio * optimizer.defaults["lr"]},
        "warmup_stable_decay": {
            "num_decay_steps": max(1, (total_steps - warm_up) // 10),
            "min_lr_ratio": min_lr_ratio,
        },
    }
    scheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warm_up,
        # `polynomial` divides by the steps after warm-up, and `linear` takes step t of t for its end.
        num_training_steps=max(total_steps, warm_up + 1),
        scheduler_specific_kwargs=floor.get(name),
    )
    if not isinstance(scheduler, LambdaLR):
        raise ConfigError(f"--lr_scheduler: must be a function of the step; got {name}. Choose another schedule.")
    return scheduler


def total_steps(steps_per_epoch: int, max_epochs: int, max_steps: int | None) -> int:
    """Return the length of a run, schedule included, in steps."""
    return max_steps or max_epochs * steps_per_epoch


def is_due(every: int, step: int, steps_per_epoch: int) -> bool:
    """Return whether what is done every N steps is due after this one; 0 is never, below 0 at the end of each epoch."""
    return every != 0 and step % (every if every > 0 else steps_per_epoch) == 0


def warmup_steps(name: str, total_steps: int, warmup_ratio: float) -> int:
    """Return how many of a run's steps are warm-up."""
    return 0 if name == "constant" else math.ceil(total_steps * warmup_ratio)


def learning_rates(scheduler: LambdaLR, update: int) -> list[float]:
    """Return each parameter group's learning rate in that update, counted from 1."""
    return [float(base * factor(update)) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]


def rates_of_run(
    learning_rate: float, name: str, *, total_steps: int, warmup_ratio: float = 0.0, min_lr_ratio: float = 0.1
) -> list[float]:
    """Return the learning rate of each step of a run, in order, as `create_scheduler` would give them."""
    optimizer = SGD([torch.zeros(1)], lr=learning_rate)
    scheduler = create_scheduler(
        optimizer, name, total_steps=total_steps, warmup_ratio=warmup_ratio, min_lr_ratio=min_lr_ratio
    )
    return [learning_rates(scheduler, step)[0] for step in range(1, total_steps + 1)]
