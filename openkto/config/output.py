"""Settings of a run's output: the model, records, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from openkto.config.option import LARGE, option

# What --keep_best may follow, and which way is better.
HIGHER_IS_BETTER = {
    **dict.fromkeys(("rewards/auc", "rewards/accuracy", "rewards/margins", "rewards/chosen"), True),
    **dict.fromkeys(("loss", "rewards/rejected"), False),
}

# What --report_to may name beside TensorBoard, by the package that is imported, and what is installed for it.
TRACKERS = {
    **{name: name for name in ("aim", "clearml", "dvclive", "mlflow", "swanlab", "trackio", "wandb")},
    "comet_ml": "comet-ml",
}


@dataclass(frozen=True)
class OutputConfig:
    save_path: str = option("./ckpt", "folder for the trained model, run.yaml and metrics.jsonl", is_path=True)
    use_tensorboard: str | None = option(
        None,
        "folder for TensorBoard's files; none turns it off",
        default_text="<save_path>/tensorboard",
        is_path=True,
        openrlhf="off",
        may_differ=True,
    )
    use_wandb: bool = option(
        False, "log to W&B; the key comes from WANDB_API_KEY or `wandb login`, never from here", may_differ=True
    )
    report_to: list[str] = option(  # noqa: RUF009 (a plain field)
        [],
        "log to these trackers, too; wandb is --use_wandb, and tensorboard is on anyway. --wandb_project and "
        "--wandb_run_name are the names for all of them, keys come from each one's own login or variables",
        choices=(*sorted(TRACKERS), "tensorboard"),
        default_text="none",
        may_differ=True,
    )
    wandb_org: str | None = option(None, "W&B entity", default_text="your own", may_differ=True)
    wandb_group: str | None = option(None, "W&B group", default_text="none", may_differ=True)
    wandb_project: str = option("openkto", "W&B project", openrlhf="openrlhf_train_dpo", may_differ=True)
    wandb_run_name: str | None = option(
        None, "W&B run name", default_text="kto_<date>", openrlhf="rm_<date>", may_differ=True
    )
    push_to_hub: str | None = option(
        None,
        "the name of a repository on the Hugging Face Hub, such as my-name/support, that the model or adapter is "
        "uploaded to when the run is at its end; the key comes from HF_TOKEN or `hf auth login`, never from here",
        default_text="off",
        train_only=True,
        of_one_start=True,
        may_differ=True,
    )
    hub_public: bool = option(
        False,
        "let everyone see the repository of --push_to_hub; without it a new one is private",
        train_only=True,
        of_one_start=True,
        may_differ=True,
    )


@dataclass(frozen=True)
class CheckpointConfig:
    ckpt_path: str | None = option(
        None,
        "folder for the checkpoints; on several nodes it must be on a shared disk",
        default_text="<save_path>/checkpoints",
        is_path=True,
        openrlhf="./ckpt/checkpoints_kto",
        train_only=True,
    )
    save_steps: int = option(
        -1,
        "save a checkpoint every N steps and at the end; -1 is once per epoch, 0 only when the run is stopped early",
        "steps",
        at_least=-1,
        below=LARGE,
        default_text="-1: once per epoch",
        openrlhf="-1: never",
        train_only=True,
    )
    save_every_minutes: float | None = option(
        None,
        "also save a checkpoint when N minutes have passed since the last one",
        "minutes",
        above=0,
        default_text="off",
        train_only=True,
    )
    max_ckpt_num: int = option(
        3,
        "keep at most N checkpoints; the oldest is deleted when a new one is complete",
        at_least=1,
        below=LARGE,
        train_only=True,
    )
    max_ckpt_mem: float = option(
        1e8, "keep at most N GB of checkpoints; the newest is always kept", "GB", above=0, train_only=True
    )
    keep_best: str | None = option(
        None,
        "a metric of the first evaluation set, such as rewards/auc; the checkpoint of its best step is never deleted",
        choices=tuple(HIGHER_IS_BETTER),
        default_text="off",
        train_only=True,
    )
    early_stop_patience: int | None = option(
        None,
        "end the run after N evaluations in a row without a better value of --keep_best's metric",
        "evaluations",
        at_least=1,
        below=LARGE,
        default_text="off",
        train_only=True,
        same_run=True,
    )
    load_best_at_end: bool = option(
        False,
        "write the model of --keep_best's best step, not that of the last step",
        train_only=True,
        same_run=True,
    )
    save_hf_ckpt: bool = option(
        False, "also save the model as a Hugging Face folder with each checkpoint", train_only=True
    )
    disable_ds_ckpt: bool = option(
        False, "write no DeepSpeed checkpoints; the run then cannot be resumed", train_only=True
    )
    save_failed_step: bool = option(
        False,
        "save the state before a step that gives NaN, so that the step can be repeated",
        train_only=True,
    )
    load_checkpoint: bool | str = option(
        False,
        "resume from the newest complete checkpoint, or start from the beginning if there is none; with a path (a "
        "checkpoint, a run's folder, .../best) resume from that one or stop with an error",
        is_path=True,
        train_only=True,
        of_one_start=True,
    )
    overwrite: bool = option(
        False,
        "start from the beginning although --save_path holds another model or run: the model is replaced when the new "
        "one is complete; old checkpoints and records are kept under a number",
        train_only=True,
        of_one_start=True,
    )
    use_ds_universal_ckpt: bool = option(
        False,
        "does nothing; accepted because OpenRLHF has it. Any checkpoint can be resumed on any number of ranks and at "
        "any ZeRO stage",
        train_only=True,
    )
    max_time: str | None = option(
        None,
        "save a checkpoint and stop when the command has run for this long",
        "days:hours:minutes:seconds",
        default_text="no limit",
        is_duration=True,
        train_only=True,
        of_one_start=True,
    )
    stall_minutes: float = option(
        30.0,
        "when the run has made no progress for N minutes, show what every rank is doing; 0 is never",
        "minutes",
        at_least=0,
    )
    stall_end_minutes: float = option(
        90.0,
        "when there is still no progress N minutes after --stall_minutes, end all ranks with exit status 75; 0 is "
        "never",
        "minutes",
        at_least=0,
    )
