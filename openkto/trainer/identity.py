"""What must be the same when a run is resumed, keyed by setting names, and the error if it differs."""

import hashlib
import json
from typing import Any

from torch import nn

from openkto.batches.loader import KTODataLoader
from openkto.config import settings
from openkto.distributed.agreement import check_all_agree
from openkto.distributed.gather import whole_shape
from openkto.errors import CheckpointError
from openkto.masking import masked

EVAL_ROWS = "eval_rows_fingerprint"  # only where evaluations decide the run's end or its model
# What is part of a run besides its settings, in the words of an error.
WORDS = {
    "total_steps": "the number of steps (--max_steps, --max_epochs)",
    "training_rows": "the number of training rows",
    "rows_fingerprint": "the training rows (fingerprint)",
    "trained_parameters": "the trained parameters",
    "policy_files": "the files of the policy",
    "reference_files": "the files of the reference",
    EVAL_ROWS: "the first evaluation set's rows (fingerprint)",
}
# What every version has saved: where it is absent, the file was changed. Later fields are compared if both have them.
ALWAYS_SAVED = (
    *("loss_type", "beta", "desirable_loss_weight", "undesirable_loss_weight", "label_smoothing", "sft_loss_coef"),
    *("humanline_low", "humanline_high", "aux_loss_coef", "max_norm", "ref_sync_steps", "ref_sync_alpha"),
    *("train_batch_size", "seed", "learning_rate", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "l2"),
    *("adam_betas", "param_dtype", "grad_accum_dtype", "max_len", "truncation", "lora_rank", "lora_alpha"),
    *("target_modules", "lora_dropout", "use_rslora", "use_dora", "lora_modules_to_save", "load_in_4bit"),
    *(name for name in WORDS if name != EVAL_ROWS),
)


def in_words(name: str) -> str:
    """Return what an error calls a part of the identity: its flag, or words."""
    return f"--{name}" if name in settings() else WORDS.get(name, name)


def identity_of(model: nn.Module, loader: KTODataLoader, total_steps: int) -> dict[str, Any]:
    """Return what model, data and schedule say a run is: what must not change until it ends."""
    shapes = [(name, list(whole_shape(p))) for name, p in model.named_parameters() if p.requires_grad]
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]
    return {
        **schedule_identity(loader, total_steps),
        "trained_parameters": f"{len(shapes)} tensors, {digest}",
    }


def schedule_identity(loader: KTODataLoader, total_steps: int) -> dict[str, Any]:
    """Return the part of `identity_of` that is known without a model."""
    return {
        "train_batch_size": loader.train_batch_size,
        "seed": loader.seed,
        "training_rows": loader.num_rows,
        "total_steps": total_steps,
    }


def by_names(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a saved identity keyed by setting names; earlier versions keyed it by the words of their errors."""
    names = {words: name for name, words in WORDS.items()}
    return {names.get(key, key.removeprefix("--")): value for key, value in saved.items()}


def check_same_on_all_ranks(strategy: Any, identity: dict[str, Any], loader: KTODataLoader) -> None:
    """Raise ConfigError where the ranks differ in the identity or in what the plan of micro-batches follows from."""
    plan = {
        "micro_train_batch_size": loader.micro_train_batch_size,
        "max_tokens_per_micro_batch": loader.max_tokens,
    }
    check_all_agree(strategy, {in_words(name): value for name, value in (identity | plan).items()})


def check_same_run(place: str, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Compare what a run is made of with what it was made of when its checkpoint was saved.

    What an older version did not know to save is not compared; what all have saved must be there.

    Raises:
        CheckpointError: naming all that differs.
    """
    saved = by_names(saved)
    lacking = [in_words(name) for name in ALWAYS_SAVED if name in now and name not in saved]
    if lacking:
        raise CheckpointError(
            f"{place}: must say which run wrote it; got one without {', '.join(lacking[:3])}"
            f"{' and more' if len(lacking) > 3 else ''}. It was changed after it was written: name another."
        )
    differences = [
        f"{in_words(name)} was {_short(value)}, is {_short(now.get(name))}"
        for name, value in saved.items()
        if value != now.get(name)
    ]
    if differences:
        raise CheckpointError(
            f"{place}: cannot resume: these settings differ from the run that wrote the checkpoint: "
            f"{'; '.join(differences)}. Give the same, or leave --load_checkpoint out to start from the beginning "
            "(from these weights: openkto convert_checkpoint makes a model of them for --pretrain)."
        )


def _short(value: Any) -> str:
    text = "not set" if value is None else masked(str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
