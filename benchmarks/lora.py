"""LoRA against full fine-tuning, step time and memory: `python -m benchmarks.lora MODEL ROWS`, a process for each."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 3
COMMON = (
    "--max_len 256 --train_batch_size 8 --micro_train_batch_size 4 --eval_steps 0 --use_tensorboard none "
    f"--max_steps {STEPS}"
).split()
RUNS = {
    "full fine-tuning": "--learning_rate 5e-6",
    "LoRA rank 8, a second model as the reference": "--lora_rank 8 --ref_mode model",
    "LoRA rank 8, the adapter off as the reference": "--lora_rank 8",
    "the same with gradient checkpointing": "--lora_rank 8 --gradient_checkpointing",
}


def measure(model: str, rows: str, flags: list[str], folder: str) -> tuple[list[dict], int]:
    """Return the run's metrics lines and the bytes of what it saved."""
    command = [sys.executable, "-m", "openkto", "train", "--pretrain", model, "--dataset", rows, "--save_path", folder]
    subprocess.run([*command, *COMMON, *flags], check=True, stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    weights = max(Path(folder).glob("*.safetensors"), key=lambda file: file.stat().st_size)
    return [line for line in lines if line["kind"] == "train"], weights.stat().st_size


def main() -> None:
    model, rows, *more = sys.argv[1:]
    for name, flags in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            lines, size = measure(model, rows, [*flags.split(), *more], folder)
        first, timed = lines[0], lines[1:]
        print(
            f"{name}: {sum(line['step_time_s'] for line in timed) / len(timed):.1f} s a step, "
            f"{lines[-1]['peak_memory_gb']:.2f} GiB, {size / 2**20:.1f} MiB saved, first rewards "
            f"{first['rewards/chosen']} and {first['rewards/rejected']}, loss {first['loss']:.4f} to "
            f"{lines[-1]['loss']:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
