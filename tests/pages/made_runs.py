"""Run folders as training leaves them, made of numbers that a test knows."""

import json
from pathlib import Path


def train_line(step: int, **values: float) -> dict:
    return {"kind": "train", "step": step, "epoch": step / 10, "loss": 0.5, "rewards/auc": 0.5, **values}


def write_run(folder: Path, lines: list[dict], settings: str = "pretrain: model\nbeta: 0.1\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.yaml").write_text(settings)
    return folder


def start(total_steps: int = 100, step: int = 0) -> dict:
    return {"kind": "run", "step": step, "openkto": "0", "run_id": "ab", "total_steps": total_steps}


def summary(step: int) -> dict:
    return {"kind": "summary", "step": step, "loss": 0.4, "seconds": 75.0}


def learning_run(folder: Path, steps: int = 100) -> Path:
    """A run that learns, with two evaluations and each row's rewards, and text in its settings that is markup."""
    lines = [start(steps)]
    for step in range(1, steps + 1):
        share = step / steps
        values = {"rewards/auc": 0.5 + 0.4 * share, "rewards/chosen": share, "rewards/rejected": -share}
        values |= {
            "rewards/margins": 2 * share,
            "kl": 0.1,
            "kl_unclamped": 0.1,
            "grad_norm": 0.5,
            "learning_rate": 1e-6,
        }
        lines.append(train_line(step, **values))
        if step in (steps // 2, steps):
            lines.append({"kind": "eval", "step": step, "loss": 0.45, "rewards/auc": 0.5 + 0.35 * share})
    write_run(folder, [*lines, summary(steps)], "pretrain: <b>model</b>\ndataset: [rows.jsonl]\nbeta: 0.1\n")
    with (folder / "rewards.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            rewards = [step / steps, -step / steps, 0.5 * step / steps, -0.5 * step / steps]
            line = {"step": step, "rows": [0, 1, 2, 3], "desirable": [True, False, True, False]}
            file.write(json.dumps(line | {"rewards": rewards, "point": 0.0}) + "\n")
    return folder
