"""OpenKTO against TRL in one run: the same rows, model, global batches and precision, in turns.

    python -m benchmarks.vs_trl [--rows FILE] [--batch 32] [--steps 3] [--rounds 2]

A random-weight Llama of 32M parameters in float32 on a CPU. Each side is a process of its own and trains on the same
rows in the same order, so that step for step both see the same global batch. TRL runs as it comes (its defaults, but
for the precision), and at its best: the reference's log-probabilities precomputed, no gradient checkpointing, and the
batch size of a device that a short trial finds fastest; it has no packing and no grouping by length for KTO.
`--sides` takes others: both with their layers compiled by torch.compile; TRL at its best but for the device's batch,
which is its default of 8; TRL with the rows of each global batch sorted by length beforehand, which is no setting of
its own but anybody's to do; and OpenKTO with the reference in the loop.

TRL is installed into a virtual environment of its own, which sees the packages of this one, so torch and transformers
are the same. FLOPs are those that torch counts in the last step, which is not timed. The table is printed last.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.limit import run_flags
from benchmarks.material import SMALL, add_arguments, prepare, read_rows, write_rows

TRL = "1.16.0"
ROOT = Path(__file__).parent.parent
AS_IT_COMES: dict[str, Any] = {}
AT_ITS_BEST = {"precompute_ref_log_probs": True, "gradient_checkpointing": False}
PER_DEVICE_DEFAULT = 8  # of transformers' TrainingArguments
SIDES = {
    "openkto": "OpenKTO",
    "openkto-compiled": "OpenKTO, compiled",
    "openkto-model": "OpenKTO, reference in the loop",
    "trl": "TRL, as it comes",
    "trl-best": "TRL, at its best",
    "trl-best-compiled": "the same, compiled",
    "trl-best-8": "the same, 8 rows at a time",
    "trl-sorted": "the same, rows of a batch sorted",
}
# What a side adds to the command line, or sets in TRL's configuration.
FLAGS: dict[str, list[str]] = {
    "openkto": [], "openkto-compiled": ["--torch_compile"], "openkto-model": ["--ref_mode", "model"]
}  # fmt: skip
SETTINGS = {
    "trl": AS_IT_COMES, "trl-best": AT_ITS_BEST, "trl-best-compiled": AT_ITS_BEST | {"torch_compile": True},
    "trl-best-8": AT_ITS_BEST, "trl-sorted": AT_ITS_BEST,
}  # fmt: skip
WITH_BEST_BATCH = ("trl-best", "trl-best-compiled", "trl-sorted")  # the others take the default one
Result = dict[str, Any]


def main(argv: list[str]) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, batch=32, steps=3, max_len=1024)
    parser.add_argument("--rounds", type=int, default=2, help="how often each side runs (%(default)s)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["openkto", "trl-best", "trl"])
    parser.add_argument("--trl_batch", type=int, nargs="+", default=[2, 4, 8], help="what its best is looked for among")
    parser.add_argument("--venv", type=Path, default=Path(f"~/.cache/openkto/benchmarks/trl-{TRL}").expanduser())
    args, flags = parser.parse_known_args(argv)
    python = install_trl(args.venv)
    with tempfile.TemporaryDirectory() as scratch:
        comparison = Comparison(Path(scratch), args, flags, python)
        if any(side in args.sides for side in WITH_BEST_BATCH):
            comparison.find_best_batch(args.trl_batch)
        results: dict[str, list[Result]] = {side: [] for side in args.sides}
        for number in range(args.rounds):
            for side in args.sides:
                print(f"round {number + 1}: {SIDES[side]}", file=sys.stderr, flush=True)
                results[side].append(comparison.run(side))
    print_table(results, comparison, args)


def install_trl(folder: Path) -> Path:
    """Return the Python of a virtual environment with TRL, made first where it is not there yet."""
    python = folder / "bin/python"
    if not (folder / "complete").is_file():
        print(f"installing trl {TRL} into {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        # Both sides must run on the same torch and transformers: its environment sees ours.
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "openkto_benchmark.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", f"trl=={TRL}"], check=True)
        (folder / "complete").touch()
    return python


class Comparison:
    """The rows and the model that both sides get, and the runs of either."""

    def __init__(self, folder: Path, args: argparse.Namespace, flags: list[str], python: Path) -> None:
        self.folder, self.args, self.flags, self.python = folder, args, flags, python
        self.steps = args.steps + 2  # one to warm up, one whose FLOPs are counted
        self.per_device = PER_DEVICE_DEFAULT
        self.runs = 0
        rows, self.model = prepare(folder, args.rows, 2 * args.batch * self.steps, SMALL)
        self.rows, self.lengths = self._in_order(rows)

    def _in_order(self, path: Path) -> tuple[list[Any], list[int]]:
        """Return the rows in the order of OpenKTO's first epoch, and their tokens; both leave out what is too long."""
        from openkto.batches.loader import KTODataLoader
        from openkto.data.dataset import UnpairedPreferenceDataset
        from openkto.models import load_tokenizer

        data = UnpairedPreferenceDataset(
            path, load_tokenizer(str(self.model)), self.args.max_len, cache_dir=self.folder / "cache"
        )
        loader = KTODataLoader(data, self.args.batch, self.args.batch)
        if len(loader) < self.steps:
            raise SystemExit(
                f"--rows: must make {self.steps} steps of {self.args.batch} rows; got {len(data)} rows that fit. Give "
                "more, or lower --batch or --steps."
            )
        order = loader.order(0)[: self.args.batch * self.steps]
        all_rows = read_rows(path)
        lengths = data.cut_lengths(data.prompt_lengths[order], data.completion_lengths[order])
        return [all_rows[row] for row in data.rows[order]], lengths.tolist()

    def find_best_batch(self, candidates: list[int]) -> None:
        """Set the device's batch with which TRL is fastest, by two steps of each where there is a choice."""
        trials = {}
        for per_device in candidates if len(candidates) > 1 else []:
            self.per_device = per_device
            trials[per_device] = self._theirs("trl-best", steps=3)["seconds"][1]
            print(f"TRL, {per_device} rows at a time: {trials[per_device]:.1f} s a step", file=sys.stderr, flush=True)
        self.per_device = min(trials, key=lambda n: trials[n]) if trials else candidates[0]

    def run(self, side: str) -> Result:
        """Train with one side once and return what it saw."""
        return self._ours(side) if side in FLAGS else self._theirs(side, self.steps)

    def _ours(self, side: str) -> Result:
        self.runs += 1
        folder = self.folder / f"run{self.runs}"  # nothing of an earlier run is found, the reference's cache neither
        folder.mkdir()
        flags = run_flags(
            folder, self.model, self.folder / "rows.jsonl", self.args.batch, self.args.max_len, self.steps
        )
        flags += [*FLAGS[side], *self.flags]
        return self._spawn(sys.executable, "benchmarks.vs_trl_ours", folder, {"flags": flags})

    def _theirs(self, side: str, steps: int) -> Result:
        self.runs += 1
        folder = self.folder / f"run{self.runs}"
        folder.mkdir()
        rows, batch = self.rows[: self.args.batch * steps], self.args.batch
        if side == "trl-sorted":
            order = sorted(range(len(rows)), key=lambda i: (i // batch, -self.lengths[i]))
            rows = [rows[i] for i in order]
        settings = {
            "folder": str(folder), "rows": str(write_rows(folder / "rows.jsonl", rows)), "model": str(self.model),
            "batch": batch, "max_len": self.args.max_len, "dtype": "fp32", "version": TRL,
            "per_device": min(self.per_device if side in WITH_BEST_BATCH else PER_DEVICE_DEFAULT, batch),
            "more": SETTINGS[side],
        }  # fmt: skip
        return self._spawn(self.python, "benchmarks.vs_trl_theirs", folder, settings, steps)

    def _spawn(
        self, python: Path | str, module: str, folder: Path, settings: dict[str, Any], steps: int | None = None
    ) -> Result:
        settings |= {
            "steps": steps or self.steps, "threads": self.args.threads, "clock": self.args.clock,
            "result": f"{folder}/result.json",
        }  # fmt: skip
        file = folder / "settings.json"
        file.write_text(json.dumps(settings), encoding="utf-8")
        environment = os.environ | {
            "OMP_NUM_THREADS": str(self.args.threads), "PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": f"{folder}/hf",
            "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        started = time.time()
        done = subprocess.run(
            [str(python), "-m", module, str(file)], cwd=ROOT, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(f"{module} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        result: Result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return result | {"start_up": result["began"] - started}


def print_table(results: dict[str, list[Result]], comparison: Comparison, args: argparse.Namespace) -> None:
    """Print a line a side, and the ratios to OpenKTO's."""
    batch, measured = args.batch, range(1, args.steps + 1)
    tokens = [sum(comparison.lengths[batch * step : batch * (step + 1)]) for step in range(comparison.steps)]
    own = next(iter(results))

    def rate(side: str) -> float:
        spent = [sum(r["seconds"][s] for s in measured) for r in results[side]]
        return sum(tokens[s] for s in measured) / statistics.median(spent)

    def peak(side: str) -> float:
        return statistics.median(r["peak_gib"][args.steps] for r in results[side])

    def rise(side: str) -> float:
        return statistics.median(r["peak_gib"][args.steps] - r["base_gib"] for r in results[side])

    def flops(side: str) -> float:
        return float(results[side][0]["computed_flops"])

    source = "drawn rows" if args.rows is None else args.rows.name
    print(
        f"\n{source}, max_len {args.max_len}, batches of {batch}, {tokens[1]} tokens in the second; {args.rounds} "
        f"rounds of {args.steps} steps; torch {torch.__version__}, {args.threads} threads, {args.clock} clock; TRL's "
        f"best device batch: {comparison.per_device}\n"
    )
    titles = (
        "", "tokens/s", "samples/s", "OpenKTO is faster by", "peak GiB (above start)", "OpenKTO's over it",
        "computed FLOPs over OpenKTO's", "start-up s",
    )  # fmt: skip
    print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
    for side in results:
        samples = rate(side) * batch / statistics.mean(tokens[s] for s in measured)
        start = statistics.median(r["start_up"] for r in results[side])
        print(
            f"| {SIDES[side]} | {rate(side):.0f} | {samples:.2f} | {rate(own) / rate(side):.2f} | {peak(side):.2f} "
            f"({rise(side):.2f}) | {peak(own) / peak(side):.2f} ({rise(own) / rise(side):.2f}) | "
            f"{flops(side) / flops(own):.2f} | {start:.0f} |"
        )
    for side in results:
        seconds = ", ".join(f"{r['seconds'][s]:.1f}" for r in results[side] for s in measured)
        print(f"\nseconds of {SIDES[side]}'s steps: {seconds}", end="")
    useful = results[own][0].get("useful_flops")
    if useful:
        print(f"\ncomputed by {SIDES[own]} over useful: {flops(own) / useful[-1]:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
