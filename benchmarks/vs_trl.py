"""OpenKTO against TRL in one run: the same rows, model, global batches and precision, a step and whole epochs.

    python -m benchmarks.vs_trl [--rows FILE] [--prompts 20 50 80] [--spread 1] [--batch 8] [--steps 2] [--epochs 1 3]

A random-weight Llama of 32M parameters in float32 on a CPU. Each side is a process of its own, and the sides take
turns; all train on the same rows, in epochs of a few steps. Of each side the table has the seconds of a step, those
from its start to the saved model for each number of epochs (with the imports, the reading of the rows, and the cache
of the reference or what TRL calls precomputing), and the peak of memory, all in ratio to OpenKTO's. Rows are those of a
file, drawn ones whose prompts have these percents of the tokens, or, where neither is given, drawn ones as long as real
ones.

Sides: OpenKTO as it comes, which caches the reference (`--ref_mode auto`); with the reference in the loop; TRL as it
comes (its defaults, but for the precision); TRL at its best: the reference's log-probabilities precomputed, no gradient
checkpointing, and the batch size of a device that a short trial finds fastest; it has no packing and no grouping by
length for KTO. `--sides` takes others: both with their layers compiled by torch.compile; TRL at its best but for the
device's batch, which is its default of 8; and with the rows of each global batch sorted by length beforehand, which is
no setting of its own but anybody's to do.

OpenKTO's cache grows with the epochs, so that side runs once for each number of them. The other sides run the longest
and the shorter ones are read off it: up to the end of their last epoch, and then the saving.

TRL is installed into a virtual environment of its own, which sees the packages of this one, so torch and transformers
are the same. Lines are printed as soon as all sides have run on some rows. Other flags are those of `openkto train`.
With the defaults it takes about eight minutes on two cores; more steps say more, since imports do not grow with them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.limit import run_flags
from benchmarks.material import SMALL, add_arguments, draw_rows, draw_shares, prepare, read_rows, write_rows
from benchmarks.vs_trl_table import Result, Rows, header, lines
from openkto.batches.loader import KTODataLoader
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.models import load_tokenizer

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
FILLS_A_CACHE = ("openkto", "openkto-compiled")  # of pairs, of which each epoch has others


def main(argv: list[str]) -> int:
    """Measure and print the table; return 1 where a side fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, batch=8, steps=2, max_len=1024, steps_are="steps in an epoch")
    parser.add_argument("--prompts", type=int, nargs="+", default=[], help="percents of the tokens, of drawn rows")
    parser.add_argument("--tokens", type=int, default=256, help="in a row of those, about (%(default)s)")
    parser.add_argument(
        "--spread", type=float, default=0.0, help="of their lengths: standard deviation of the logarithm (%(default)s)"
    )
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 3], help="of the runs (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="how often each side runs (%(default)s)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["openkto", "openkto-model", "trl-best", "trl"])
    parser.add_argument("--trl_batch", type=int, nargs="+", default=[2, 4], help="what its best is looked for among")
    parser.add_argument("--venv", type=Path, default=Path(f"~/.cache/openkto/benchmarks/trl-{TRL}").expanduser())
    args, flags = parser.parse_known_args(argv)
    if any(args.batch % min(rows, args.batch) for rows in (*args.trl_batch, PER_DEVICE_DEFAULT)):
        parser.error(
            f"--batch: must be whole batches of a device, of {PER_DEVICE_DEFAULT} rows and of --trl_batch, so that TRL "
            f"makes the same steps; got {args.batch} and {args.trl_batch}"
        )
    python = install_trl(args.venv)
    print(header(args), flush=True)
    failed = False
    for name, found in row_sets(args).items():
        with tempfile.TemporaryDirectory() as scratch:
            comparison = Comparison(Path(scratch), found, args, flags, python)
            if any(side in args.sides for side in WITH_BEST_BATCH):
                comparison.find_best_batch(args.trl_batch)
            results = comparison.run_all()
        failed |= any(not runs for runs in results.values())
        print("\n".join(lines(name, comparison.about, results, SIDES, args.epochs)), flush=True)
        print(f"{name}: TRL's best batch of a device was {comparison.per_device}", file=sys.stderr, flush=True)
    return int(failed)


def row_sets(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the rows to measure on, by name; more than are needed, since some may not fit."""
    wanted = 2 * args.batch * args.steps
    found = {} if args.rows is None else {args.rows.name: read_rows(args.rows)}
    for share in args.prompts:
        name = f"drawn, prompts {share}%" + (f", spread {args.spread:g}" if args.spread else "")
        found[name] = draw_shares(wanted, args.tokens, share / 100, spread=args.spread)
    return found or {"drawn, as long as real ones": draw_rows(wanted)}


def install_trl(folder: Path) -> Path:
    """Return the Python of a virtual environment with TRL, made first where it is not there yet."""
    python = folder / "bin/python"
    if not (folder / "complete").is_file():
        print(f"installing trl {TRL} into {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        # Both sides must run on the same torch and transformers: its environment sees all that ours does.
        (own,) = folder.glob("lib/python*/site-packages")
        ours = [path for path in sys.path if Path(path).name == "site-packages"]
        (own / "openkto_benchmark.pth").write_text("".join(f"{path}\n" for path in ours), encoding="utf-8")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", f"trl=={TRL}"], check=True)
        (folder / "complete").touch()
    return python


class Comparison:
    """The rows and the model that all sides get, and the runs of each.

    Args:
        found: rows, of which the first that fit are taken, in a shuffled order.
        flags: of `openkto train`, besides.
        python: of TRL's environment.
    """

    def __init__(
        self, folder: Path, found: list[dict[str, Any]], args: argparse.Namespace, flags: list[str], python: Path
    ) -> None:
        self.folder, self.args, self.flags, self.python = folder, args, flags, python
        self.per_device = PER_DEVICE_DEFAULT
        self.runs = 0
        path, self.model = prepare(folder, found, SMALL)
        data, order = self._read(path)
        wanted = args.batch * args.steps
        if len(order) < wanted:
            raise SystemExit(
                f"--rows: must have {wanted} rows for {args.steps} steps of {args.batch}; got {len(order)} that fit "
                f"into {args.max_len} tokens. Give more, or lower --batch or --steps."
            )
        taken = [found[row] for row in data.rows[order[:wanted]]]
        self.file = write_rows(folder / "taken.jsonl", taken)
        data, order = self._read(self.file)
        assert len(order) == wanted, "the rows that are taken fit"
        self.in_order = [taken[row] for row in data.rows[order]]  # of OpenKTO's first epoch, and of all of TRL's
        self.lengths = data.cut_lengths(data.prompt_lengths, data.completion_lengths)[order].tolist()
        self.about = Rows(args.batch, args.steps, sum(self.lengths), int(data.prompt_lengths.sum()))

    def _read(self, path: Path) -> tuple[UnpairedPreferenceDataset, Any]:
        """Return the rows of a file that fit, and their places in the order of OpenKTO's first epoch."""
        tokenizer = load_tokenizer(str(self.model))
        data = UnpairedPreferenceDataset(path, tokenizer, self.args.max_len, cache_dir=self.folder / "cache")
        return data, KTODataLoader(data, self.args.batch, self.args.batch).order(0)

    def find_best_batch(self, candidates: list[int]) -> None:
        """Set the device's batch with which TRL is fastest, by the second of two steps, where there is a choice."""
        trials = {}
        for per_device in candidates if len(candidates) > 1 else []:
            self.per_device = per_device
            try:
                result = self._theirs("trl-best", 1, self.in_order[: 2 * self.args.batch])
            except RuntimeError as error:
                print(f"TRL, {per_device} rows at a time: {error}", file=sys.stderr, flush=True)
                continue
            trials[per_device] = result["ended"][-1] - [result["began"], *result["ended"]][-2]
            print(f"TRL, {per_device} rows at a time: {trials[per_device]:.1f} s a step", file=sys.stderr, flush=True)
        self.per_device = min(trials, key=lambda n: trials[n]) if trials else candidates[0]

    def run_all(self) -> dict[str, list[dict[int, Result]]]:
        """Return of each side what it saw in each round, by the number of epochs; nothing where it failed."""
        results: dict[str, list[dict[int, Result]]] = {side: [] for side in self.args.sides}
        for _ in range(self.args.rounds):
            for side, seen in results.items():
                try:
                    seen.append(self.run(side))
                except RuntimeError as error:
                    print(f"{SIDES[side]}: {error}", file=sys.stderr, flush=True)
        return results

    def run(self, side: str) -> dict[int, Result]:
        """Train with one side and return what it saw, by the number of epochs; see the module for which are run."""
        wanted = sorted(self.args.epochs) if side in FILLS_A_CACHE else [max(self.args.epochs)]
        run = self._ours if side in FLAGS else self._theirs
        return {epochs: run(side, epochs) for epochs in wanted}

    def _ours(self, side: str, epochs: int) -> Result:
        folder = self._new_folder()  # nothing of an earlier run is found, the reference's cache neither
        flags = run_flags(folder, self.model, self.file, self.args.batch, self.args.max_len)
        flags += ["--ref_mode", "auto", "--max_epochs", str(epochs), *FLAGS[side], *self.flags]
        return self._spawn(sys.executable, "benchmarks.vs_trl_ours", folder, {"flags": flags}, f"{side}, {epochs}")

    def _theirs(self, side: str, epochs: int, rows: list[Any] | None = None) -> Result:
        folder, batch, rows = self._new_folder(), self.args.batch, rows or self.in_order
        if side == "trl-sorted":
            order = sorted(range(len(rows)), key=lambda i: (i // batch, -self.lengths[i]))
            rows = [rows[i] for i in order]
        settings = {
            "folder": str(folder), "rows": str(write_rows(folder / "rows.jsonl", rows)), "model": str(self.model),
            "batch": batch, "max_len": self.args.max_len, "dtype": "fp32", "epochs": epochs, "max_steps": -1,
            "per_device": min(self.per_device if side in WITH_BEST_BATCH else PER_DEVICE_DEFAULT, batch),
            "more": SETTINGS[side],
        }  # fmt: skip
        return self._spawn(self.python, "benchmarks.vs_trl_theirs", folder, settings, f"{side}, {epochs}")

    def _new_folder(self) -> Path:
        self.runs += 1
        folder = self.folder / f"run{self.runs}"
        folder.mkdir()
        return folder

    def _spawn(self, python: Path | str, module: str, folder: Path, settings: dict[str, Any], name: str) -> Result:
        """Run a side's process and return what it saw.

        Raises:
            RuntimeError: it failed.
        """
        threads, clock, file = self.args.threads, self.args.clock, folder / "settings.json"
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": f"{folder}/hf",
            "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        settings |= {"threads": threads, "clock": clock, "result": f"{folder}/result.json", "started": time.time()}
        file.write_text(json.dumps(settings), encoding="utf-8")
        done = subprocess.run(
            [str(python), "-m", module, str(file)], cwd=ROOT, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        spent = time.time() - settings["started"]
        print(f"{name} epochs: {spent:.0f} s", file=sys.stderr, flush=True)
        if done.returncode != 0:
            raise RuntimeError(f"ended with status {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        result: Result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
