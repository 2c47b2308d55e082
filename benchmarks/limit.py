"""How near is a training step to what the machine can multiply, and where does the rest of its time go?

    python -m benchmarks.limit [--rows FILE] [--batch 64] [--steps 3] [flags of openkto train]

A random-weight Llama of 32M parameters, float32, the reference's log-probabilities cached. Useful FLOPs (see
`openkto/report/flops.py`) over the seconds of a step, over the rate at which the same process multiplies matrices
before and after that step: those of the model's own layers with the tokens of a large micro-batch, and large square
ones, by torch's products and by oneDNN's, which the layers take on a CPU that is not Intel's. The best shape counts.
The tables are printed last.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.clocks import CLOCKS
from benchmarks.material import SMALL, add_arguments, draw_rows, prepare, read_rows
from benchmarks.watch import PARTS, StepWatch
from openkto.commands import train
from openkto.models.onednn import linear

TOKENS = 2048  # rows of the matrices, about a micro-batch
SECONDS_A_SHAPE = 0.25
WAYS = {"torch's": F.linear, "oneDNN's": linear}


def matrix_rates(
    shape: dict[str, int],
    dtype: torch.dtype,
    device: str,
    clock: Callable[[], float] = time.perf_counter,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear,
) -> dict[str, float]:
    """Return the FLOP/s of matrix products, by name; each the median of some."""
    hidden, inner, vocabulary = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    products = {
        "attention's projections": (TOKENS, hidden, hidden),
        "MLP up": (TOKENS, hidden, inner),
        "MLP down": (TOKENS, inner, hidden),
        "head": (256, hidden, vocabulary),
        "square of 2,048": (2048, 2048, 2048),
        "square of 4,096": (4096, 4096, 4096),
    }
    rates = {}
    for name, (rows, inside, columns) in products.items():
        left = torch.randn(rows, inside, dtype=dtype, device=device)
        right = torch.randn(columns, inside, dtype=dtype, device=device)
        seconds: list[float] = []
        while sum(seconds) < SECONDS_A_SHAPE or len(seconds) < 3:
            started = clock()
            multiply(left, right)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(clock() - started)
        rates[f"{name} ({rows} x {inside} by {inside} x {columns})"] = (
            2 * rows * inside * columns / statistics.median(seconds)
        )
    return rates


def main(argv: list[str]) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, batch=64, steps=2, max_len=1024)
    args, flags = parser.parse_known_args(argv)
    torch.set_num_threads(args.threads)
    clock = CLOCKS[args.clock]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        found = draw_rows(args.batch * (args.steps + 1)) if args.rows is None else read_rows(args.rows)
        rows, model = prepare(folder, found, SMALL)
        rates: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}

        def measure() -> None:
            for way, multiply in WAYS.items():
                rates[way].append(matrix_rates(SMALL, torch.float32, "cpu", clock, multiply))

        watch = StepWatch(clock=clock, between=measure)
        length = ["--max_steps", f"{args.steps + 1}"]
        train.main([*run_flags(folder, model, rows, args.batch, args.max_len), *length, *flags])
    print_tables(watch, rates, args.clock)
    sys.stdout.flush()
    os._exit(0)  # gloo may abort an exit that has nothing left to do


def run_flags(folder: Path, model: Path, rows: Path, batch: int, max_len: int) -> list[str]:
    """Return the command line of the training that is measured: float32, on a CPU, the reference cached.

    How long it is has to be added.
    """
    return [
        "--pretrain", f"{model}", "--dataset", f"{rows}", "--save_path", f"{folder}/ours", "--param_dtype", "fp32",
        "--train_batch_size", f"{batch}", "--max_len", f"{max_len}", "--zero_stage", "0",
        "--micro_train_batch_size", f"{batch}", "--max_tokens_per_micro_batch", "4096", "--ref_mode", "cached",
        "--ref_cache_dir", f"{folder}/reference", "--data_cache_dir", f"{folder}/cache", "--use_tensorboard", "none",
        "--learning_rate", "1e-6", "--eval_steps", "0", "--disable_ds_ckpt",
    ]  # fmt: skip


def print_tables(watch: StepWatch, rates: dict[str, list[dict[str, float]]], clock: str) -> None:
    """Print the rates, the use of the best of them, and the parts of the mean step.

    Args:
        rates: by way of multiplying, after each step, the first one included, which is to warm up.
    """
    steps = watch.steps[1:]
    print(f"\n| product, GFLOP/s (least to most) | {' | '.join(rates)} |\n| --- |{' --- |' * len(rates)}")
    for name in next(iter(rates.values()))[0]:
        found = [sorted(turn[name] / 1e9 for turn in turns) for turns in rates.values()]
        cells = [f"{statistics.median(own):.0f} ({own[0]:.0f} to {own[-1]:.0f})" for own in found]
        print(f"| {name} | {' | '.join(cells)} |")
    seconds = sum(step["seconds"] for step in steps)
    print("\n| part of a step | seconds | share |\n| --- | --- | --- |")
    for part in PARTS:
        spent = sum(step["parts"].get(part, 0.0) for step in steps)
        print(f"| {part} | {spent / len(steps):.3f} | {spent / seconds:.1%} |")
    print(f"| whole | {seconds / len(steps):.3f} | |")
    making = statistics.mean(watch.batch_seconds)
    print(f"| (planning and making a batch, in a thread beside) | {making:.3f} | {making * len(steps) / seconds:.2%} |")
    print(
        f"\n{len(steps)} steps of {steps[0]['rows']} rows, {statistics.mean(s['tokens'] for s in steps):.0f} matched "
        f"tokens each, padding {statistics.mean(s['padding'] for s in steps):.1%}; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {clock} clock"
    )
    useful = [step["useful_flops"] / step["seconds"] for step in steps]
    for way, turns in rates.items():
        best = max(turns[0], key=lambda name: statistics.median(turn[name] for turn in turns))
        around = [(before[best] + after[best]) / 2 for before, after in pairwise(turns)]
        shares = [rate / limit for rate, limit in zip(useful, around, strict=True)]
        print(
            f"useful {statistics.median(useful) / 1e9:.1f} GFLOP/s of {way} {statistics.median(around) / 1e9:.1f} "
            f"({best}): MFU {statistics.median(shares):.1%}, of single steps "
            f"{', '.join(f'{share:.1%}' for share in shares)}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
