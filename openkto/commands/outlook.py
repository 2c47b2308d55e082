"""Describes a run before it starts: its tokens and steps, and a warning if it is too short to teach the model much."""

import logging
import math

import numpy as np

from openkto.batches.batch import batch_bounds
from openkto.batches.pairing import unavoidable_collisions
from openkto.commands.data import FEW_PAIRS, few_pairs, own_pairs
from openkto.commands.folder import checkpoints_root
from openkto.config import (
    OptimConfig,
    RunConfig,
    learning_rate_of,
)
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.report import some_rows
from openkto.trainer.schedule import rates_of_run, total_steps, warmup_steps

log = logging.getLogger(__name__)

FEW_STEPS = 20


def say_outlook(config: RunConfig, rows: UnpairedPreferenceDataset) -> None:
    """Log the tokens and steps of the run, and the warnings."""
    log.info("%s", describe_tokens(rows))
    repeated = num_repeated(rows)
    if repeated:
        log.info("data: doubles: %s with another row's prompt, completion and label", some_rows(repeated))
    log.info("%s", describe_steps(config, len(rows)))
    log.info("%s", describe_checkpoints(config))
    warn_of_outlook(config, rows)


def warn_of_outlook(config: RunConfig, rows: UnpairedPreferenceDataset) -> None:
    """Log a warning for each thing that makes the run teach little."""
    for line in [*outlook_warnings(config, len(rows)), *collisions(config, rows)]:
        log.warning("warning: %s", line)


def describe_tokens(rows: UnpairedPreferenceDataset) -> str:
    """Say how long prompts and completions are, before any cut, and how many tokens an epoch has."""
    prompts, completions = (
        f"{int(np.median(lengths))} in the median and {lengths.max()} at most"
        for lengths in (rows.prompt_lengths, rows.completion_lengths)
    )
    total = int(rows.cut_lengths(rows.prompt_lengths, rows.completion_lengths).sum())
    return f"tokens: prompts {prompts}, completions {completions}; {total} an epoch, with --max_len {rows.max_len}"


def num_repeated(rows: UnpairedPreferenceDataset) -> int:
    """Return how many source rows have the same tokens and label as one before them."""
    _, first = np.unique(rows.rows, return_index=True)  # mixing draws rows more than once
    base = int(rows.completion_keys.max()) + 1
    codes = (rows.prompt_keys * base + rows.completion_keys) * 2 + rows.labels
    return len(first) - len(np.unique(codes[first]))


def describe_steps(config: RunConfig, num_rows: int) -> str:
    """Say in a line how many steps the run has, of how many rows, and at what learning rate."""
    sizes, steps = _sizes_and_steps(config, num_rows)
    epochs = f"{steps / len(sizes):.3g} epochs" if steps != len(sizes) else "1 epoch"
    fewest, most = int(sizes.min()), int(sizes.max())
    a_step = some_rows(most) if fewest == most else f"{fewest} to {most} rows"
    warm_up = warmup_steps(config.optim.lr_scheduler, steps, config.optim.lr_warmup_ratio)
    return (
        f"steps: {steps}, {epochs} of {some_rows(num_rows)}, {a_step} a step, {warm_up} of warm-up, learning "
        f"rate up to {learning_rate_of(config):g}"
    )


def describe_checkpoints(config: RunConfig) -> str:
    """Say when the run saves a checkpoint, and where."""
    saving = config.checkpoint
    if saving.disable_ds_ckpt and not saving.save_hf_ckpt:
        return "checkpoints: none (--disable_ds_ckpt)"
    times = []
    if saving.save_steps:
        times.append("after each epoch" if saving.save_steps < 0 else f"every {saving.save_steps} steps")
    if saving.save_every_minutes is not None:
        times.append(f"every {saving.save_every_minutes:g} minutes")
    times = [*times, "at the end"] if times else ["when the run is stopped early"]
    return f"checkpoints: {', '.join(times)}, in {checkpoints_root(config)}"


def outlook_warnings(config: RunConfig, num_rows: int) -> list[str]:
    """Return a sentence for each thing that makes the run teach little, with the flag to change."""
    optim, (sizes, steps) = config.optim, _sizes_and_steps(config, num_rows)
    warnings = []
    if steps < FEW_STEPS:
        has = "the run has 1 step" if steps == 1 else f"the run has {steps} steps"
        warnings.append(f"{has}; with fewer than {FEW_STEPS} the model hardly changes. {_longer(config, num_rows)}")
        rates = rates_of_run(
            learning_rate_of(config),
            optim.lr_scheduler,
            total_steps=steps,
            warmup_ratio=optim.lr_warmup_ratio,
            min_lr_ratio=optim.min_lr_ratio,
        )
        if not any(rates):
            warnings.append(
                f"--lr_scheduler {optim.lr_scheduler}: the learning rate of all steps is 0, so nothing is trained. "
                f"Take {OptimConfig().lr_scheduler} or constant, or make the run longer."
            )
    if config.loss.facts.needs_z_ref and sizes.max() < FEW_PAIRS:
        cure = "Raise --train_batch_size" if num_rows >= FEW_PAIRS else "Add rows"
        warnings.append(f"{few_pairs(int(sizes.max()), 'a step')} {cure}, or take --loss_type apo_zero_unpaired.")
    patience = config.checkpoint.early_stop_patience
    if patience is not None:
        every = config.train.eval_steps if config.train.eval_steps > 0 else len(sizes)
        evaluations = math.ceil(steps / every)
        if evaluations <= patience:
            warnings.append(
                f"--early_stop_patience {patience}: the run has {evaluations} evaluations, so it cannot end early. "
                "Lower it or --eval_steps."
            )
    return warnings


def collisions(config: RunConfig, rows: UnpairedPreferenceDataset) -> list[str]:
    """Say how many mismatched pairs of an epoch keep their own prompt or completion, however rows are paired."""
    if not config.loss.facts.needs_z_ref:
        return []
    train = config.train
    count = unavoidable_collisions(rows.prompt_keys, rows.completion_keys, train.train_batch_size, train.seed)
    if count == 0:
        return []
    larger = ", and a larger --train_batch_size may" if train.train_batch_size < len(rows) else ""
    return [
        f"{own_pairs(count, len(rows), 'an epoch', 'a batch')} More varied rows help{larger}; --loss_type "
        "apo_zero_unpaired needs no z_ref."
    ]


def _longer(config: RunConfig, num_rows: int) -> str:
    """Return the flags that would make the run long enough."""
    train = config.train
    if train.max_steps is not None:
        sizes, steps = _sizes_and_steps(config, num_rows)
        is_shorter = steps < total_steps(len(sizes), train.max_epochs, None)
        return f"Raise --max_steps{', or leave it out' if is_shorter else ''}."
    batch = min(train.train_batch_size, max(FEW_PAIRS, num_rows * train.max_epochs // FEW_STEPS))
    change = [f"--train_batch_size {batch}"] if batch < train.train_batch_size else []
    epochs = math.ceil(FEW_STEPS / max(1, len(batch_bounds(num_rows, batch)) - 1))
    change += [f"--max_epochs {epochs}"] if epochs > train.max_epochs else []
    return f"Pass {' '.join(change)}, for example, or give more rows."


def _sizes_and_steps(config: RunConfig, num_rows: int) -> tuple[np.ndarray, int]:
    """Return the rows in each batch of an epoch, and the steps of the run."""
    train = config.train
    sizes = np.diff(batch_bounds(num_rows, train.train_batch_size))
    return sizes, total_steps(len(sizes), train.max_epochs, train.max_steps)
