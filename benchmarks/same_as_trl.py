"""Is our loss TRL's? Trains a tiny model with both on the same rows in the same order and compares each step's loss.

    python -m benchmarks.same_as_trl [FOLDER]

TRL is no dependency of OpenKTO: install it first (`pip install trl==1.16.0`). Where TRL can be exact (one micro-batch a
step, one process, distinct prompts, no shuffling), the two must agree to float32 round-off.
"""

import json
import sys
import tempfile
from pathlib import Path

import datasets
import transformers

from openkto.commands import train
from tests.text_rows import write_model, write_rows

ROWS, BATCH, LEARNING_RATE, BETA = 32, 8, 1e-3, 0.2


def main(folder: Path) -> int:
    """Print both losses of each step; return 1 where they differ by more than 1e-5."""
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl", ROWS)
    train.main(
        [
            "--pretrain", f"{folder}/model", "--dataset", f"{folder}/rows.jsonl", "--train_batch_size", str(BATCH),
            "--micro_train_batch_size", "3", "--learning_rate", str(LEARNING_RATE), "--lr_scheduler", "constant",
            "--lr_warmup_ratio", "0", "--beta", str(BETA), "--desirable_loss_weight", "1.3", "--zero_stage", "2",
            "--param_dtype", "fp32", "--log_batches", "--save_path", f"{folder}/ours", "--use_tensorboard", "none",
            "--data_cache_dir", f"{folder}/cache",
        ]
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / "ours/metrics.jsonl").read_text().splitlines()]
    ours = [line["loss"] for line in lines if line["kind"] == "train"]
    theirs = trl_losses(folder)
    print("step   OpenKTO        TRL            difference")
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        print(f"{step:4}   {a:.9f}    {b:.9f}    {a - b:+.1e}")
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"largest difference {worst:.1e}")
    return int(worst > 1e-5)


def trl_losses(folder: Path) -> list[float]:
    """Return TRL's loss at each step, fed our order of rows."""
    from trl import KTOConfig, KTOTrainer

    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    order = [r for line in (folder / "ours/batches.jsonl").read_text().splitlines() for r in json.loads(line)["rows"]]
    model, reference = (transformers.AutoModelForCausalLM.from_pretrained(folder / "model") for _ in range(2))
    config = KTOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=BATCH, learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", beta=BETA, desirable_weight=1.3, undesirable_weight=1.0, num_train_epochs=1,
        adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0, weight_decay=0.0, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = KTOTrainer(
        model=model,
        ref_model=reference,
        args=config,
        train_dataset=datasets.Dataset.from_list([rows[r] for r in order]),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    target.mkdir(parents=True, exist_ok=True)
    sys.exit(main(target))
