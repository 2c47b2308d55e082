"""What a training command asks of its checkpoints before it loads a model."""

import dataclasses
import datetime
import logging
import os
from pathlib import Path
from typing import Any

import torch

from openkto.commands.same_run import describe_models, prints_of_models
from openkto.config import LoraConfig, RunConfig, to_flat, with_resolved
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.template import uses_date
from openkto.distributed.checkpoint import Checkpoints
from openkto.distributed.tensor_parallel import split_of
from openkto.models.export import RECORDS_BYTES
from openkto.trainer.run_state import check_same_run
from openkto.trainer.saving import count

log = logging.getLogger(__name__)

# Settings, beside those that the trainer itself knows, with which a resumed run would be another one. Not --ref_mode:
# all modes give the numbers of the reference's files, which are compared.
SAME_SETTINGS = (
    *("learning_rate", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "l2", "adam_betas"),
    *("param_dtype", "grad_accum_dtype", "max_len", "truncation", "template_date"),
    *(item.name for item in dataclasses.fields(LoraConfig)),
)
ADAM_BYTES = 12  # a parameter's float32 master copy and two moments


def on_one_day(config: RunConfig, strategy: Any, tokenizer: Any, checkpoints: Checkpoints | None = None) -> RunConfig:
    """Return the configuration with the day that the chat template is to print, where it prints today's date.

    A run keeps the day on which it first started: its rows are the same on all ranks, in every start. All ranks must
    call it.

    Args:
        checkpoints: of a run that may be resumed.

    Raises:
        CheckpointError: the one to resume from is not complete.
    """
    ranks = strategy.gather_objects((uses_date(tokenizer), datetime.date.today().isoformat()))
    if not any(prints_date for prints_date, _ in ranks):
        return config
    day = config.data.template_date
    if day is None and checkpoints is not None:
        found = checkpoints.choose(config.checkpoint.load_checkpoint)
        day = found.state["identity"].get("--template_date") if found is not None else None
    if day is None:
        day = ranks[0][1]
    log.info(
        "data: the chat template prints the date: %s in all rows, of this start and later ones (template_date)", day
    )
    return with_resolved(config, template_date=day)


def identity_of_command(
    config: RunConfig, strategy: Any, rows: UnpairedPreferenceDataset, models: tuple[str, str]
) -> dict[str, Any]:
    """Return what the command line says a run is; the trainer adds what it knows itself. All ranks must call it.

    Raises:
        ConfigError: the ranks have different model files, or some that cannot be read.
    """
    flat = to_flat(config)
    same = {f"--{name}": list(v) if isinstance(v := flat[name], tuple) else v for name in SAME_SETTINGS}
    files = describe_models(models, prints_of_models(strategy, models))
    return same | files | {"the training rows (fingerprint)": rows.fingerprint()}


def is_done(config: RunConfig, checkpoints: Checkpoints, identity: dict[str, Any]) -> bool:
    """Find the checkpoint to resume from, and whether nothing is left to do; all ranks must call it.

    Raises:
        CheckpointError: the checkpoint is not complete, or is another run's.
    """
    found = checkpoints.choose(config.checkpoint.load_checkpoint)
    if found is None:
        return False
    saved = {name: value for name, value in found.state["identity"].items() if name in identity}
    check_same_run(str(found.folder), saved, identity)
    folder = Path(config.output.save_path)
    has_model = any((folder / name).exists() for name in ("config.json", "adapter_config.json"))
    if not (checkpoints.is_finished(found) and checkpoints.strategy.gather_objects(has_model)[0]):
        return False
    step, total = found.state["run"]["step"], found.state["total_steps"]
    log.info("nothing is left to do: %d of %d steps are done, and the model is in %s", step, total, folder)
    return True


def checkpoint_bytes(config: RunConfig, trainer: Any, zero_stage: int) -> int:
    """Return about how much a checkpoint takes, with the saved model where that goes to the same disk."""
    model = trainer.num_trainable * trainer.export_dtype.itemsize
    a_parameter = torch.tensor([], dtype=trainer.model.module.model.dtype).element_size()
    total = 0
    if not config.checkpoint.disable_ds_ckpt:
        # What ranks that share weights have whole, each writes.
        copies = config.deepspeed.tensor_parallel_size - 1
        trained = [parameter for parameter in trainer.model.module.parameters() if parameter.requires_grad]
        whole = count(parameter for parameter in trained if split_of(parameter) is None)
        total += (trainer.num_trainable + copies * whole) * (ADAM_BYTES + (a_parameter if zero_stage in (1, 2) else 0))
        if config.model.ref_sync_steps > 0:
            total += trainer.num_parameters * a_parameter
    if config.checkpoint.save_hf_ckpt:
        total += model
    root = config.checkpoint.ckpt_path or config.output.save_path
    if Path(root).exists() and os.stat(root).st_dev == os.stat(config.output.save_path).st_dev:
        total += model + RECORDS_BYTES
    return total
