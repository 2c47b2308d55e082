"""What a training command reads from its checkpoints before it loads a model."""

import datetime
import logging
import os
from pathlib import Path
from typing import Any

import torch

from openkto.batches.loader import KTODataLoader
from openkto.commands.build import Models
from openkto.commands.same_run import describe_models, prints_of_models
from openkto.config import RunConfig, option_of, to_flat, with_resolved
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.template import uses_date
from openkto.distributed.checkpoint import Checkpoints, Found
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.distributed.tensor_parallel import split_of
from openkto.models.export import RECORDS_BYTES
from openkto.models.model_files import problem_with_model
from openkto.trainer.ending import Ending
from openkto.trainer.final_model import count
from openkto.trainer.identity import EVAL_ROWS, by_names, check_same_run, schedule_identity
from openkto.trainer.run_state import RunState
from openkto.trainer.schedule import total_steps

log = logging.getLogger(__name__)

ADAM_BYTES = 12  # a parameter's float32 master copy and two moments


def on_one_day(config: RunConfig, strategy: DeepspeedStrategy, tokenizer: Any, found: Found | None = None) -> RunConfig:
    """Return the configuration with the day that the chat template is to print, where it prints today's date.

    A run keeps the day on which it first started: its rows are the same on all ranks, in every start. All ranks must
    call it.

    Args:
        found: the checkpoint that is resumed from, if any.
    """
    ranks = strategy.gather_objects((uses_date(tokenizer), datetime.date.today().isoformat()))
    if not any(prints_date for prints_date, _ in ranks):
        return config
    day = config.data.template_date
    if day is None and found is not None:
        day = by_names(found.state["identity"]).get("template_date")
    if day is None:
        day = ranks[0][1]
    log.info(
        "data: the chat template prints the date: %s in all rows, of this start and later ones (template_date)", day
    )
    return with_resolved(config, template_date=day)


def identity_of_command(
    config: RunConfig,
    strategy: DeepspeedStrategy,
    rows: UnpairedPreferenceDataset,
    models: Models,
    eval_rows: dict[str, UnpairedPreferenceDataset] | None = None,
) -> dict[str, Any]:
    """Return what the command line says a run is; the trainer adds what it knows itself. All ranks must call it.

    Args:
        eval_rows: of a run that evaluates; its first set decides when the run ends early and which model it leaves.

    Raises:
        ConfigError: the ranks have different model files, or some that cannot be read.
    """
    same = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in to_flat(config).items()
        if option_of(name).same_run
    }
    files = describe_models(models, prints_of_models(strategy, models))
    if config.checkpoint.early_stop_patience is not None or config.checkpoint.load_best_at_end:
        # What the run's end, or the model that it leaves, is decided by.
        same |= {"keep_best": config.checkpoint.keep_best, "eval_steps": config.train.eval_steps}
        if eval_rows:
            same[EVAL_ROWS] = next(iter(eval_rows.values())).fingerprint()
    return same | files | {"rows_fingerprint": rows.fingerprint()}


def is_done(
    config: RunConfig, checkpoints: Checkpoints, found: Found, identity: dict[str, Any], loader: KTODataLoader
) -> bool:
    """Whether nothing is left to do of the run that a checkpoint belongs to; all ranks must call it.

    Raises:
        CheckpointError: it is another run's.
    """
    total = total_steps(len(loader), config.train.max_epochs, config.train.max_steps)
    now = identity | schedule_identity(loader, total)
    check_same_run(
        str(found.folder), {name: v for name, v in by_names(found.state["identity"]).items() if name in now}, now
    )
    folder, run = Path(config.output.save_path), RunState.from_json(found.state["run"])
    step, stop = run.step, config.train.stop_after_steps
    ending = Ending(total, stop, config.checkpoint.keep_best, config.checkpoint.early_stop_patience)
    if stop is not None and stop <= step and not ending.is_whole(run):
        log.warning(
            "warning: --stop_after_steps %d: is reached, %d of %d steps are done, and none will be made. Leave it out "
            "to train the other %d.",
            stop,
            step,
            total,
            total - step,
        )
    if not checkpoints.is_finished(found):
        return False
    sizes = checkpoints.finished_files(found)
    problem = checkpoints.strategy.gather_objects(problem_with_model(folder, sizes))[0]
    if problem is not None:
        log.warning("warning: %s: %s; the model is made again from %s", folder, problem, found.folder)
        return False
    why = f" ({ending.reason(run)})" if ending.is_early(run) else ""
    log.info("nothing is left to do: %d of %d steps are done%s, and the model is in %s", step, total, why, folder)
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
