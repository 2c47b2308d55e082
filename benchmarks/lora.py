"""LoRA against full fine-tuning, a process for each: time, memory and what is saved.

    python -m benchmarks.lora MODEL ROWS [flags of openkto train]

The processor's seconds are those of the whole process, start included; on a busy
machine they say more than the clock's.
"""

import json
import resource
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


def measure(model: str, rows: str, flags: list[str], folder: str) -> tuple[list[dict], float, int]:
    """Return the run's metrics lines, the processor's seconds and the bytes of what it saved."""
    command = [sys.executable, "-m", "openkto", "train", "--pretrain", model, "--dataset", rows, "--save_path", folder]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, *COMMON, *flags], check=True, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    weights = max(Path(folder).glob("*.safetensors"), key=lambda file: file.stat().st_size)
    return [line for line in lines if line["kind"] == "train"], seconds, weights.stat().st_size


def main() -> None:
    """Print a line a run."""
    model, rows, *more = sys.argv[1:]
    for name, flags in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            lines, seconds, size = measure(model, rows, [*flags.split(), *more], folder)
        steps = sum(line["step_time_s"] for line in lines) / len(lines)
        first, last = lines[0], lines[-1]
        print(
            f"{name}: {seconds:.0f} s of the processor, {steps:.1f} s a step, {last['peak_memory_gb']:.2f} GiB, "
            f"{size / 2**20:.1f} MiB saved; first rewards {first['rewards/chosen']} and {first['rewards/rejected']}, "
            f"loss {first['loss']:.4f} to {last['loss']:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
