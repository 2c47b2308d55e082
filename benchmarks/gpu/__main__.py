"""One GPU, nine minutes, no network: is what runs there right, how fast is it, and what limits it?

    python -m benchmarks.gpu [--minutes 9] [--tiny] [--out FILE]

First the checks (`checks.py`), then random-weight Llama shapes of 1B (full, ZeRO 1 and 2, one step of it profiled,
and with the reference in the loop with `--share_prompts` on and off) and 8B (LoRA) on drawn rows as long as real ones,
and TRL at its best on the same 1B, rows and batches where `trl` can be imported. Each is a process of its own that is
ended when its time is over; what failed or was left out is said with its reason, and takes nothing else with it. A
machine's start and the wheels come on top of the nine minutes. What must be installed beside torch, transformers,
accelerate and peft: `benchmarks/gpu/wheels.py`. `--tiny` runs all of it in tiny shapes on any machine, to see that it
runs. The tables are printed last, and each result goes into `--out` as soon as it is there.
"""

import argparse
import importlib.util
import statistics
import sys
import tempfile
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.budget import Budget
from benchmarks.material import draw_rows, train_tokenizer, write_model, write_rows
from openkto.data.dataset import UnpairedPreferenceDataset

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
STEPS = 4
OWN, THEIRS = "1B full, ZeRO 1", "1B full, TRL at its best"


def main(argv: list[str]) -> int:
    """Run what the time allows and print the tables; return 1 where a check fails or a run ends badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="that all may take together (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on any machine")
    parser.add_argument("--out", type=Path, help="also write the results there, as JSON, each when it is there")
    args = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.tiny:
        parser.error("there is no GPU here: pass --tiny to see that it runs")
    with tempfile.TemporaryDirectory() as scratch:
        budget = Budget(args.minutes, Path(scratch), args.out)
        try:
            measure(budget, Path(scratch), tiny=args.tiny, precision="bf16" if on_gpu else "fp32")
        except Exception as error:
            # What was measured until then is still to be printed.
            traceback.print_exc()
            budget.left_out.append(f"the rest: {type(error).__name__}: {error}")
    print_tables(budget.results, budget.left_out)
    return int(bool(budget.left_out) or not all(ok for *_, ok in budget.results["checks"] or []))


def measure(budget: Budget, folder: Path, *, tiny: bool, precision: str) -> None:
    """Run what the time allows, the most telling first."""
    shape_1b, shape_8b, checked = (TINY, TINY, TINY) if tiny else (ONE_B, EIGHT_B, CHECKED)
    batch, max_len, micro_tokens = (8, 128, 512) if tiny else (64, 2048, 16384)
    rows = draw_rows(batch * (STEPS + 4))
    tokenizer = train_tokenizer(rows, 512 if tiny else 8192)
    drawn = write_rows(folder / "drawn.jsonl", rows)
    # TRL cuts a prompt that is too long, and OpenKTO leaves the row out: both get the rows that fit.
    fitting = UnpairedPreferenceDataset(drawn, tokenizer, max_len, cache_dir=folder / "cache").rows
    file = write_rows(folder / "rows.jsonl", [rows[row] for row in fitting])
    model = write_model(folder / "model", checked, tokenizer)
    common: dict[str, Any] = {"rows": str(file), "model": str(model), "precision": precision}
    speed = common | {
        "batch": batch, "max_len": max_len, "micro_tokens": micro_tokens, "steps": STEPS, "profile": False,
        "gradient_checkpointing": False, "write_model": "", "lora": 0, "shape": shape_1b, "zero_stage": 1,
        "share_prompts": "auto", "ref_mode": "cached",
    }  # fmt: skip
    theirs = folder / "1b"
    has_trl = importlib.util.find_spec("trl") is not None
    budget.run("checks", "benchmarks.gpu.checks", common | {"shape": checked}, 180)
    own = {"profile": True, "write_model": str(theirs) if has_trl else ""}
    budget.run(OWN, "benchmarks.gpu.speed", speed | own, 120)
    for choice in ("on", "off"):
        more = {"share_prompts": choice, "ref_mode": "model"}
        budget.run(
            f"1B full, reference in the loop, --share_prompts {choice}", "benchmarks.gpu.speed", speed | more, 70
        )
    if has_trl and (theirs / "config.json").is_file():
        tokenizer.save_pretrained(theirs)
        budget.run(THEIRS, "benchmarks.vs_trl_theirs", trl_settings(speed, theirs, file), 120)
    else:
        why = "our own run did not write the model" if has_trl else "it is not installed here"
        print(f"nothing is compared with TRL: {why}", flush=True)
    lora = {"shape": shape_8b, "lora": 16, "batch": max(8, batch // 4), "ref_mode": "adapter"}
    budget.run("8B LoRA, ZeRO 1", "benchmarks.gpu.speed", speed | lora, 120)
    budget.run("1B full, ZeRO 2", "benchmarks.gpu.speed", speed | {"zero_stage": 2}, 70)


def trl_settings(speed: dict[str, Any], model: Path, rows: Path) -> dict[str, Any]:
    """Return TRL's settings at its best: no reference in the loop, no recomputation, its layers' fast kernels."""
    more: dict[str, Any] = {"precompute_ref_log_probs": True, "gradient_checkpointing": False}
    if torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None:
        more["use_liger_kernel"] = True
    return {
        "model": str(model), "rows": str(rows), "batch": speed["batch"], "max_len": speed["max_len"],
        "epochs": 1, "max_steps": STEPS + 2, "dtype": speed["precision"], "per_device": 8, "clock": "wall",
        "threads": torch.get_num_threads(), "more": more,
    }  # fmt: skip


def print_tables(results: dict[str, Any], left_out: list[str]) -> None:
    """Print the checks, the speeds, the profile and what was left out."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"\n{card}, torch {torch.__version__}, drawn rows as long as real ones\n\n| check | value | bound | |")
    print("| --- | --- | --- | --- |")
    for name, value, bound, ok in results.get("checks") or []:
        print(f"| {name} | {value:.2e} | {bound:.0e} | {'ok' if ok else 'FAILED'} |")
    print("\n| run | tokens/s | step s | useful TFLOP/s | MFU of the data sheet | of the matrix rate | peak GiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, result in results.items():
        if name == "checks" or result is None:
            continue
        print(trl_line(name, result, results.get(OWN)) if name == THEIRS else own_line(name, result))
    for name, result in results.items():
        if name != "checks" and result and result.get("profile"):
            parts = ", ".join(f"{kind} {share:.1%}" for kind, share in result["profile"].items())
            print(f"\none step of {name} ({result['attention']}): {parts}")
    for line in left_out:
        print(f"failed or left out: {line}")


def own_line(name: str, result: dict[str, Any]) -> str:
    """Return the table's line of a run of OpenKTO."""
    steps = result["steps"]
    if not steps:
        return f"| {name} | no step was measured | | | | | |"
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
    seconds, peak = statistics.median(b - a for a, b in pairwise(result["ended"])), result["peak_gib"][-1]
    if own is None or not own["steps"]:
        return f"| {name} | - | {seconds:.2f} | - | - | - | {peak:.2f} |"
    tokens = statistics.mean(step["tokens"] for step in own["steps"])
    return f"| {name} | {tokens / seconds:.0f} | {seconds:.2f} | - | - | - | {peak:.2f} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
