"""The settings that `KTOTrainer.fit` reads."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FitArgs:
    """The fields that `KTOTrainer.fit` reads; every one has its flag's meaning and default."""

    save_path: str = "./ckpt"
    max_steps: int | None = None
    stop_after_steps: int | None = None
    logging_steps: int = 1
    eval_steps: int = -1
    eval_at_start: bool = False
    log_batches: bool = False
    log_entropy: bool = False
    use_tensorboard: str | None = None
    report_to: list[str] = field(default_factory=list)
    use_wandb: bool = False
    wandb_org: str | None = None
    wandb_group: str | None = None
    wandb_project: str = "openkto"
    wandb_run_name: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # the whole run's, shown by W&B; no key among them
    ckpt_path: str | None = None
    save_steps: int = -1
    save_every_minutes: float | None = None
    max_ckpt_num: int = 3
    max_ckpt_mem: float = 1e8
    keep_best: str | None = None
    early_stop_patience: int | None = None
    save_failed_step: bool = False
    load_checkpoint: bool | str = False
    identity: dict[str, Any] = field(default_factory=dict)  # what a resumed run must have in common with this one
