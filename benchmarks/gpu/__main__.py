"""One GPU, nine minutes, no network: is what runs there right, how fast is it, and what limits it?

    python -m benchmarks.gpu [--minutes 9] [--tiny] [--out FILE]

First the checks (`checks.py`), then random-weight Llama shapes of 1B (full, ZeRO 1 and 2, one step of it profiled)
and 8B (LoRA) on drawn rows as long as real ones, and TRL at its best on the same 1B, rows and batches where `trl` can
be imported. Each is a process of its own that is ended when its time is over; what was left out is said. What must be
installed beside torch, transformers, accelerate and peft: `benchmarks/gpu/wheels.py`. `--tiny` runs all of it in tiny
shapes on any machine, to see that it runs. The tables are printed last.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.material import draw_rows, train_tokenizer, write_model, write_rows

ROOT = Path(__file__).parents[2]
LLAMA = {"max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": True}
ONE_B = LLAMA | {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
EIGHT_B = LLAMA | {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
CHECKED = LLAMA | {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
TINY = LLAMA | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
SHORTEST = 20.0  # seconds; with less left nothing is begun
STEPS = 4


class Budget:
    """Runs processes, one after the other, until the time is over."""

    def __init__(self, minutes: float, folder: Path) -> None:
        self.folder, self.end = folder, time.monotonic() + 60 * minutes
        self.scale = minutes / 9
        self.left_out: list[str] = []

    def run(self, name: str, module: str, settings: dict[str, Any], seconds: float) -> Any:
        """Return what the process wrote, or None where it failed or was left out.

        Args:
            seconds: that it may take of nine minutes; without that much left it gets what there is.
        """
        limit = min(seconds * self.scale, self.end - time.monotonic())
        if limit < SHORTEST:
            self.left_out.append(f"{name}: no time was left")
            return None
        place = self.folder / name.replace(" ", "-").replace(",", "")
        place.mkdir()
        settings = settings | {"folder": str(place), "result": f"{place}/result.json"}
        (place / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        print(f"--- {name} (at most {limit:.0f} s)", flush=True)
        started = time.monotonic()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with (place / "log").open("w", encoding="utf-8") as log:
            try:
                done = subprocess.run(
                    [sys.executable, "-m", module, f"{place}/settings.json"], cwd=ROOT, env=environment, stdout=log,
                    stderr=subprocess.STDOUT, timeout=limit, check=False,
                )  # fmt: skip
                failure = f"ended with status {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                failure = f"was ended after {limit:.0f} s"
        text = (place / "log").read_text(encoding="utf-8", errors="replace")
        print(f"    {time.monotonic() - started:.0f} s", flush=True)
        if failure:
            self.left_out.append(f"{name}: {failure}")
            print(text[-3000:], flush=True)
            return None
        return json.loads((place / "result.json").read_text(encoding="utf-8"))


def main(argv: list[str]) -> int:
    """Run what the time allows and print the tables; return 1 where a check fails or a run ends badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="that all may take together (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on any machine")
    parser.add_argument("--out", type=Path, help="also write the results there, as JSON")
    args = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.tiny:
        parser.error("there is no GPU here: pass --tiny to see that it runs")
    with tempfile.TemporaryDirectory() as scratch:
        budget = Budget(args.minutes, Path(scratch))
        results = measure(budget, Path(scratch), tiny=args.tiny, precision="bf16" if on_gpu else "fp32")
    if args.out is not None:
        args.out.write_text(json.dumps(results | {"left out": budget.left_out}, indent=1), encoding="utf-8")
    print_tables(results, budget.left_out)
    return int(bool(budget.left_out) or not all(ok for *_, ok in results["checks"] or []))


def measure(budget: Budget, folder: Path, *, tiny: bool, precision: str) -> dict[str, Any]:
    """Return the results by name; None stands for what was left out."""
    shape_1b, shape_8b, checked = (TINY, TINY, TINY) if tiny else (ONE_B, EIGHT_B, CHECKED)
    batch, max_len, micro_tokens = (8, 128, 512) if tiny else (64, 2048, 16384)
    rows = draw_rows(batch * (STEPS + 4))
    tokenizer = train_tokenizer(rows, 512 if tiny else 8192)
    file = write_rows(folder / "rows.jsonl", rows)
    model = write_model(folder / "model", checked, tokenizer)
    common: dict[str, Any] = {"rows": str(file), "model": str(model), "precision": precision}
    speed = common | {
        "batch": batch, "max_len": max_len, "micro_tokens": micro_tokens, "steps": STEPS, "profile": False,
        "gradient_checkpointing": False, "write_model": "", "lora": 0,
    }  # fmt: skip
    results: dict[str, Any] = {
        "checks": budget.run("checks", "benchmarks.gpu.checks", common | {"shape": checked}, 200)
    }
    theirs = folder / "1b"
    has_trl = importlib.util.find_spec("trl") is not None
    results["1B full, ZeRO 1"] = budget.run(
        "1B full ZeRO 1", "benchmarks.gpu.speed",
        speed | {"shape": shape_1b, "zero_stage": 1, "profile": True, "write_model": str(theirs) if has_trl else ""},
        120,
    )  # fmt: skip
    if has_trl and theirs.is_dir():
        tokenizer.save_pretrained(theirs)
        results["1B full, TRL at its best"] = budget.run(
            "1B full TRL", "benchmarks.vs_trl_theirs", trl_settings(speed, theirs, file), 150
        )
    elif not has_trl:
        print("TRL is not installed here, so nothing is compared with it", flush=True)
    for name, more, seconds in (
        ("1B full, ZeRO 2", {"shape": shape_1b, "zero_stage": 2}, 100),
        ("8B LoRA, ZeRO 1", {"shape": shape_8b, "zero_stage": 1, "lora": 16, "batch": max(8, batch // 4)}, 150),
    ):
        results[name] = budget.run(name, "benchmarks.gpu.speed", speed | more, seconds)
    return results


def trl_settings(speed: dict[str, Any], model: Path, rows: Path) -> dict[str, Any]:
    """Return TRL's settings at its best: no reference in the loop, no recomputation, its layers' fast kernels."""
    more: dict[str, Any] = {"precompute_ref_log_probs": True, "gradient_checkpointing": False}
    if torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None:
        more["use_liger_kernel"] = True
    return {
        "model": str(model), "rows": str(rows), "batch": speed["batch"], "max_len": speed["max_len"],
        "steps": STEPS + 2, "dtype": speed["precision"], "per_device": 8, "version": "as installed", "clock": "wall",
        "threads": torch.get_num_threads(), "more": more,
    }  # fmt: skip


def print_tables(results: dict[str, Any], left_out: list[str]) -> None:
    """Print the checks, the speeds, the profile and what was left out."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"\n{card}, torch {torch.__version__}, drawn rows as long as real ones\n\n| check | value | bound | |")
    print("| --- | --- | --- | --- |")
    for name, value, bound, ok in results["checks"] or []:
        print(f"| {name} | {value:.2e} | {bound:.0e} | {'ok' if ok else 'FAILED'} |")
    print("\n| run | tokens/s | step s | useful TFLOP/s | MFU of the data sheet | of the matrix rate | peak GiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    own = results.get("1B full, ZeRO 1")
    for name, result in results.items():
        if name == "checks" or result is None:
            continue
        print(trl_line(name, result, own) if "seconds" in result else own_line(name, result))
    for name, result in results.items():
        if name != "checks" and result and result.get("profile"):
            parts = ", ".join(f"{kind} {share:.1%}" for kind, share in result["profile"].items())
            print(f"\none step of {name} ({result['attention']}): {parts}")
    for line in left_out:
        print(f"left out: {line}")


def own_line(name: str, result: dict[str, Any]) -> str:
    """Return the table's line of a run of OpenKTO."""
    steps = result["steps"]
    seconds = statistics.median(step["seconds"] for step in steps)
    useful = statistics.median(step["useful_flops"] / step["seconds"] for step in steps)
    tokens = statistics.median(step["tokens"] / step["seconds"] for step in steps)
    best = max(result["matrix_rates"].values())
    sheet = f"{useful / result['peak_flops']:.1%}" if result["peak_flops"] else "-"
    return (
        f"| {name} | {tokens:.0f} | {seconds:.2f} | {useful / 1e12:.2f} | {sheet} | {useful / best:.1%} of "
        f"{best / 1e12:.2f} | {max(step['peak_gib'] for step in steps):.2f} |"
    )


def trl_line(name: str, result: dict[str, Any], own: dict[str, Any] | None) -> str:
    """Return TRL's line: the same rows an epoch, so that its rate follows from the mean of our steps' tokens."""
    seconds = statistics.median(result["seconds"][1:-1])
    if own is None:
        return f"| {name} | - | {seconds:.2f} | - | - | - | {result['peak_gib'][-2]:.2f} |"
    tokens = statistics.mean(step["tokens"] for step in own["steps"])
    return f"| {name} | {tokens / seconds:.0f} | {seconds:.2f} | - | - | - | {result['peak_gib'][-2]:.2f} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
