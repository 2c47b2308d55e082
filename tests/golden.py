"""Twenty steps of a tiny run, kept in golden.json; `python -m tests.golden` writes it anew when numbers should move."""

import json
import tempfile
from pathlib import Path

from openkto.report.environment import environment
from tests.ranks import run_ranks
from tests.tiny import make_trainer, quiet_args, token_rows

FILE = Path(__file__).parent / "golden.json"
NAMES = (
    "loss",
    "kl",
    "kl_unclamped",
    "grad_norm",
    "rewards/chosen",
    "rewards/rejected",
    "logps/chosen",
    "learning_rate",
)


def train(folder: str, share_prompts: str) -> dict:
    """Return the environment of the run; its metrics are in the folder."""
    labels = [i % 3 != 0 for i in range(30)]
    trainer, strategy = make_trainer(
        token_rows(labels, seed=11), zero_stage=2, batch=8, micro=3, lr=5e-4, steps=20, beta=0.2,
        schedule="cosine_with_min_lr", warmup_ratio=0.1, undesirable_weight=1.5,
        share_prompts=share_prompts,
    )  # fmt: skip
    trainer.fit(quiet_args(folder, 20))
    return environment(strategy.world_size, strategy.device)


def run(folder: Path, share_prompts: str = "off") -> dict:
    """Return the run's environment and steps as golden.json holds them."""
    made_in = run_ranks(train, 2, folder, str(folder / "out"), share_prompts)[0]
    made_in.pop("git_commit", None)
    lines = map(json.loads, (folder / "out/metrics.jsonl").read_text().splitlines())
    return {
        "made_in": made_in,
        "steps": [{n: line[n] for n in NAMES if n in line} for line in lines if line["kind"] == "train"],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        FILE.write_text(json.dumps(run(Path(scratch)), indent=1) + "\n")
