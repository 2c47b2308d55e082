"""Where a run stands, and what must be the same for it to be gone on with."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from openkto.errors import CheckpointError


@dataclass
class RunState:
    """What the loop counts. With the engine, the random generators and the open log line it is the whole run."""

    step: int = 0  # steps done
    updates: int = 0  # of them, those that the optimizer applied
    consumed_samples: int = 0
    is_evaluated: bool = True  # whether the evaluation that is due after `step` has been made
    best: float | None = None  # the best value so far of the metric to keep
    best_step: int = -1
    run_id: str = ""  # the same over all starts of a run
    log_ratio_sum: float = 0.0  # nats: of the rows of all steps done, for a loss that is relative to their mean
    log_ratio_rows: int = 0

    @property
    def shift(self) -> float | None:
        """The mean log-ratio of the rows of all steps done, in nats; None where there was none."""
        return self.log_ratio_sum / self.log_ratio_rows if self.log_ratio_rows else None

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "RunState":
        """Return the state that was saved."""
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})


# What every version has saved: where it is absent, somebody took it out. Later fields are compared if both have them.
ALWAYS_SAVED = (
    *("--loss_type", "--beta", "--desirable_loss_weight", "--undesirable_loss_weight", "--label_smoothing"),
    *("--sft_loss_coef", "--humanline_low", "--humanline_high", "--aux_loss_coef", "--max_norm", "--ref_sync_steps"),
    *("--ref_sync_alpha", "--train_batch_size", "--seed", "the number of training rows"),
    *("the number of steps (--max_steps, --max_epochs)", "the trained parameters", "--learning_rate"),
    *("--lr_scheduler", "--lr_warmup_ratio", "--min_lr_ratio", "--l2", "--adam_betas", "--param_dtype"),
    *("--grad_accum_dtype", "--max_len", "--truncation", "--lora_rank", "--lora_alpha", "--target_modules"),
    *("--lora_dropout", "--use_rslora", "--use_dora", "--lora_modules_to_save", "--load_in_4bit"),
    *("the files of the policy", "the files of the reference", "the training rows (fingerprint)"),
)


def check_same_run(place: str, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Compare what a run is made of with what it was made of when its checkpoint was saved.

    What an older version did not know to save is not compared; what all have saved must be there.

    Raises:
        CheckpointError: naming all that differs.
    """
    lacking = [name for name in ALWAYS_SAVED if name in now and name not in saved]
    if lacking:
        raise CheckpointError(
            f"{place}: must say which run it is of; got one that does not say {', '.join(lacking[:3])}"
            f"{' and more' if len(lacking) > 3 else ''}. It was changed after it was written: name another."
        )
    differences = [
        f"{name} was {_short(saved[name])} and is {_short(now.get(name))}"
        for name in saved
        if saved[name] != now.get(name)
    ]
    if differences:
        raise CheckpointError(
            f"{place}: a run is gone on with as it was begun; got other settings: {'; '.join(differences)}. Give the "
            "same, or leave --load_checkpoint out to start anew (from these weights: openkto convert_checkpoint makes "
            "a model of them for --pretrain)."
        )


def _short(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
