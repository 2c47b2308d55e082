"""`openkto train`, `cli/train_kto.py`: from labelled rows and a model to a trained model.

Read `main` from the top: it is the whole way from the command line to the saved model.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from openkto.config import RunConfig, openrlhf_differences, shown_settings
from openkto.config.flags import parse
from openkto.config.run_options import RunOptions
from openkto.config.values import seconds_of
from openkto.errors import StopError
from openkto.process.run_lock import RunLocks
from openkto.process.stops import StopRequest
from openkto.process.watchdog import Watchdog

if TYPE_CHECKING:
    from openkto.data.dataset import UnpairedPreferenceDataset
    from openkto.distributed.strategy import DeepspeedStrategy

log = logging.getLogger(__name__)


def main(argv: list[str]) -> None:
    """Train as the command line says.

    Raises:
        OpenKTOError: something that the user can act on.
    """
    config, options = parse(argv, "train")
    say_what_differs(config, options)
    limit = config.checkpoint.max_time
    with StopRequest(None if limit is None else seconds_of(limit)) as stop:
        settings = config.checkpoint
        dog = Watchdog(
            settings.stall_minutes,
            int(os.environ.get("RANK", "0")),
            end_minutes=settings.stall_end_minutes,
            stop=stop,
            can_go_on=not settings.disable_ds_ckpt,
        )
        with dog as watchdog, RunLocks() as locks:
            is_whole = train(config, options, stop, watchdog, locks)
    if is_whole and config.output.push_to_hub is not None:
        push_at_the_end(config)


def train(config: RunConfig, options: RunOptions, stop: StopRequest, watchdog: Watchdog, locks: RunLocks) -> bool:
    """Go the whole way from a configuration to a saved model; return whether the run has come to its end."""
    # Only now what takes seconds to import, so that a wrong flag is answered at once.
    from openkto.commands.build import (
        check_forwards,
        check_models,
        fit_args,
        load_models,
        make_loaders,
        make_strategy,
        make_trainer,
        measure_micro_batches,
        model_names,
    )
    from openkto.commands.card import CardsOfCopies, base_model, write_card
    from openkto.commands.check import is_check
    from openkto.commands.data import read_sets, resolve, stops_of_rows
    from openkto.commands.folder import check_replaces_nothing, take_folders
    from openkto.commands.outlook import say_outlook
    from openkto.commands.push import check_push
    from openkto.commands.reference import cached_reference
    from openkto.commands.resume import checkpoint_bytes, identity_of_command, is_done, on_one_day
    from openkto.commands.same_run import fetch_models, settings_of
    from openkto.commands.samples import make_samples
    from openkto.distributed.agreement import on_some_ranks
    from openkto.models.adapter import base_of
    from openkto.models.export import check_space
    from openkto.models.loading import DTYPES
    from openkto.models.model_files import exported_files
    from openkto.trainer.ending import load_best
    from openkto.trainer.newest import find_checkpoint
    from openkto.trainer.saving import open_checkpoints
    from openkto.trainer.services import Services

    watchdog.phase("reading the models' configurations")
    models = model_names(config)
    tokenizer = check_models(config, models)
    strategy = make_strategy(config)
    if is_check(config, options, models, tokenizer):
        return False
    watchdog.phase("waiting for all ranks")
    strategy.setup_distributed(settings_of(config))
    is_first, folder = strategy.rank == 0, Path(config.output.save_path)
    on_some_ranks(strategy, lambda: take_folders(config, locks), is_mine=is_first)
    on_some_ranks(strategy, lambda: check_push(config.output, makes=True), is_mine=is_first)
    watchdog.phase("fetching the models")
    fetch_models(strategy, models)
    watchdog.phase("looking for a checkpoint")
    checkpoints = open_checkpoints(fit_args(config), strategy, with_engine=not config.checkpoint.disable_ds_ckpt)
    found = find_checkpoint(checkpoints, config.checkpoint.load_checkpoint)
    on_some_ranks(strategy, lambda: check_replaces_nothing(config, found), is_mine=is_first)
    config = on_one_day(config, strategy, tokenizer, found)
    watchdog.phase("reading the data")
    rows, eval_rows = read_sets(config, strategy, tokenizer, models)
    config = resolve(config, strategy, rows)
    say_outlook(config, rows)
    stops = stops_of_rows(rows, models.policy, config.model.trust_remote_code)
    samples = make_samples(config, strategy, tokenizer, models, eval_rows, stops)
    watchdog.phase("hashing the models' files")
    identity = identity_of_command(config, strategy, rows, models, eval_rows)
    watchdog.phase("looking for a checkpoint")
    args = fit_args(config, settings=shown_settings(config), identity=identity)
    writes_checkpoints = checkpoints.with_engine or config.checkpoint.save_hf_ckpt
    if writes_checkpoints:
        checkpoints.make_folder()
    loaders = loader, eval_loaders = make_loaders(config, strategy, rows, eval_rows)
    all_loaders = [loader, *eval_loaders.values()]
    if found is not None and is_done(config, checkpoints, found, identity, loader):
        return True
    resumed = None if found is None else found.state["run"]
    dtype = DTYPES[config.model.export_dtype or strategy.precision]
    # Hours of a reference's forwards may come before the sizes of what is saved are known.
    on_some_ranks(strategy, lambda: check_space(folder, 0, dtype), is_mine=is_first)
    cached = cached_reference(config, strategy, all_loaders, identity, models.reference, watchdog, stop, resumed)
    watchdog.phase("loading the models")
    actor, ref_actor = load_models(config, strategy, models, is_cached=cached is not None, trains=True)
    watchdog.phase("preparing the models")
    base = base_model(base_of(models.policy))
    cards = [CardsOfCopies(folder, base)] if is_first and config.checkpoint.save_hf_ckpt else []
    services = Services(checkpoints, stop, watchdog, samples, cards)
    trainer = make_trainer(config, strategy, tokenizer, actor, cached or ref_actor, loaders, dtype, services)
    if actor.has_adapter:
        log.info("the adapter's %d parameters train, of %d", trainer.num_trainable, trainer.num_parameters)
        log.info("the adapter is on %s", actor.describe_adapter())
    is_own = ref_actor is None and cached is None
    own = "the policy at the start of training" if is_own else models.reference
    log.info("the reference is %s%s", own, ", from the cache" if cached is not None else "")
    actor.stop_also_at(stops)
    check_forwards(config, strategy, actor, ref_actor, trainer.ref_model)
    measure_micro_batches(config, strategy, trainer.model, all_loaders, watchdog)
    on_some_ranks(strategy, lambda: check_space(folder, trainer.num_trainable, dtype), is_mine=is_first)
    if writes_checkpoints:
        checkpoints.check_space(checkpoint_bytes(config, trainer, strategy.zero_stage))
    on_some_ranks(strategy, lambda: write_about(config, folder, eval_rows), is_mine=is_first)
    try:
        trainer.fit(args)
    except StopError:
        wait_for_the_others(strategy)
        raise
    watchdog.phase("saving the model", is_saving=True)
    metric = config.checkpoint.keep_best
    if config.checkpoint.load_best_at_end and metric is not None:
        load_best(checkpoints, trainer.model, trainer.run, metric)
    trainer.save_model(config.output.save_path)
    log.info("the model is in %s", config.output.save_path)
    if is_first:
        write_card(folder, base)
    is_whole = trainer.ending.is_whole(trainer.run)
    if is_whole:
        checkpoints.mark_finished(trainer.run.step, folder, exported_files(folder))
    strategy.barrier()
    return is_whole


def push_at_the_end(config: RunConfig) -> None:
    """Upload the model from the first rank. The others do not wait for it: an upload may take longer than they may."""
    from openkto.commands.push import push_saved
    from openkto.distributed.launch import end_process, is_first_rank

    end_process()
    if is_first_rank():
        push_saved(config.output)


def write_about(config: RunConfig, folder: Path, eval_rows: "dict[str, UnpairedPreferenceDataset]") -> None:
    """Write run.yaml, and which rows are held out."""
    from openkto.commands.folder import write_beside_model, write_run_file
    from openkto.commands.holdout import HELD_OUT, split_of
    from openkto.data.holdout import SPLIT_FILE

    write_run_file(config, folder)
    if config.data.eval_fraction is not None:
        write_beside_model(folder / SPLIT_FILE, split_of(config, eval_rows[HELD_OUT]).to_json().encode())


def wait_for_the_others(strategy: "DeepspeedStrategy") -> None:
    """Wait until all ranks have stopped: a launcher ends all when one is gone, and the first may still be closing its
    trackers. A rank that dies meanwhile changes nothing: the checkpoint is complete.
    """
    from openkto.process.ranks import loss_of_a_rank

    try:
        strategy.barrier()
    except RuntimeError as error:
        if loss_of_a_rank(error) is None:
            raise
        log.warning("warning: another rank ended by itself while this one stopped; nothing was lost.")


def say_what_differs(config: RunConfig, options: RunOptions) -> None:
    """Log the configuration's warnings, and where it is asked for the defaults that differ from OpenRLHF's."""
    if options.openrlhf_defaults:
        lines = openrlhf_differences(options.given, use_wandb=config.output.use_wandb)
        log.info("defaults that differ from OpenRLHF's and were not given: %s", "; ".join(lines))
    for line in options.warnings:
        log.warning("warning: %s", line)
