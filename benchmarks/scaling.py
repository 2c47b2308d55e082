"""Does the cost of a run grow with its data? Start-up, memory and step time at more rows, longer rows and more epochs.

    python -m benchmarks.scaling [--rows 1000 10000 100000] [--tokens 50 500] [--epochs 1 20]

A tiny Llama on a CPU, so that what surrounds the model is what counts; each run is a process of its own. The first run
with some rows tokenises them; `again` finds them in the cache, as every later start does. Start-up and steps are in the
process's own seconds. The table is printed last.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.text_rows import write_model, write_rows

ROOT = Path(__file__).parent.parent
STEPS, BATCH, SHORT_SET = 40, 8, 256


def main(argv: list[str]) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[50, 500], help="of a row")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 20], help=f"over {SHORT_SET} rows")
    args = parser.parse_args(argv)
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "model")
        for tokens in args.tokens:
            for rows in args.rows:
                file = write_long_rows(folder / f"rows{rows}x{tokens}.jsonl", rows, tokens)
                for again in (False, True):
                    result = run(folder, file, ["--max_steps", str(STEPS)])
                    name = f"{rows} rows of {tokens} tokens{', again' if again else ''}"
                    lines.append(describe(name, result, slice(1, None)))
        file = write_long_rows(folder / "short.jsonl", SHORT_SET, args.tokens[0])
        for epochs in args.epochs:
            result = run(folder, file, ["--max_epochs", str(epochs)])
            lines.append(describe(f"{epochs} epochs over {SHORT_SET} rows", result, slice(1, None)))
            last = slice(-SHORT_SET // BATCH, None)
            if epochs > 1:
                lines.append(describe("its last epoch", result, last))
    print("\n| run | start-up s | peak GiB | median step ms | slowest tenth ms |\n| --- | --- | --- | --- | --- |")
    print("\n".join(lines))


def write_long_rows(path: Path, count: int, tokens: int) -> Path:
    """Save rows of about so many tokens: the tests' short ones with words after the answer."""
    write_rows(path, count)
    short = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    with path.open("w", encoding="utf-8") as file:
        for row in short:
            missing = max(0, tokens - len(row["prompt"]) - len(row["completion"]))
            file.write(json.dumps(row | {"completion": row["completion"] + " and" * (missing // 4)}) + "\n")
    return path


def run(folder: Path, rows: Path, more: list[str]) -> dict[str, Any]:
    """Train in a process of its own and return what it saw."""
    place = Path(tempfile.mkdtemp(dir=folder))
    flags = [
        "--pretrain", f"{folder}/model", "--dataset", f"{rows}", "--save_path", f"{place}/out", "--param_dtype", "fp32",
        "--train_batch_size", f"{BATCH}", "--max_len", "64", "--zero_stage", "0", "--use_tensorboard", "none",
        "--data_cache_dir", f"{folder}/cache", "--eval_steps", "0", "--disable_ds_ckpt", *more,
    ]  # fmt: skip
    settings = {"flags": flags, "threads": 1, "clock": "processor", "result": f"{place}/result.json"}
    (place / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.vs_trl_ours", f"{place}/settings.json"], cwd=ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"a run failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads((place / "result.json").read_text(encoding="utf-8"))
    return result


def describe(name: str, result: dict[str, Any], steps: slice) -> str:
    """Return the table's line of a run, or of some of its steps."""
    seconds = np.diff([result["began"], *result["ended"]])[steps]
    slow = float(np.percentile(seconds, 90))
    return (
        f"| {name} | {result['began']:.1f} | {result['peak_gib'][steps][-1]:.3f} | "
        f"{float(np.median(seconds)) * 1000:.1f} | {slow * 1000:.1f} |"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
