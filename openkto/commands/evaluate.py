"""`openkto evaluate`, `cli/evaluate_kto.py`: a policy against a reference on labelled rows, as a table and JSON."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openkto.config import RunConfig
from openkto.config.flags import parse
from openkto.config.run_options import RunOptions
from openkto.errors import ConfigError, StopError
from openkto.files import make_writable, numbered
from openkto.process.stops import StopRequest
from openkto.process.watchdog import Watchdog

if TYPE_CHECKING:
    from openkto.commands.build import Models
    from openkto.distributed.strategy import DeepspeedStrategy

log = logging.getLogger(__name__)


def main(argv: list[str]) -> None:
    """Evaluate as the command line says.

    Raises:
        OpenKTOError: something that the user can act on.
    """
    config, options = parse(argv, "evaluate")
    if options.note is not None:
        log.info("%s", options.note)
    output = prepare_output(output_file(config, options))
    with StopRequest() as stop:
        settings, rank = config.checkpoint, int(os.environ.get("RANK", "0"))
        dog = Watchdog(settings.stall_minutes, rank, end_minutes=settings.stall_end_minutes, stop=stop, can_go_on=False)
        with dog as watchdog:
            results = evaluate(config, options, stop, watchdog)
    if results is not None and rank == 0:
        print(table(results))
        write_numbers(results, output, replaces=options.output is not None)


def evaluate(config: RunConfig, options: RunOptions, stop: StopRequest, watchdog: Watchdog) -> dict[str, Any] | None:
    """Return each set's metrics by its name, the same on every rank; None where data was only to be checked."""
    from openkto.commands.build import make_eval_loaders, make_strategy, measure_micro_batches
    from openkto.commands.check import is_check
    from openkto.commands.data import read_evaluation_sets
    from openkto.commands.resume import on_one_day
    from openkto.commands.same_run import fetch_models, prints_of_models, settings_of
    from openkto.models.loss import KTOLoss
    from openkto.trainer.evaluation import evaluate_set

    watchdog.phase("reading the models' configurations")
    names, tokenizer = find_models(config)
    if is_check(config, options, names, tokenizer, trains=False):
        return None
    strategy = make_strategy(config)
    watchdog.phase("waiting for all ranks")
    strategy.setup_distributed(settings_of(config))
    watchdog.phase("fetching the models")
    fetch_models(strategy, names)
    watchdog.phase("hashing the models' files")
    prints = prints_of_models(strategy, names, is_needed=config.model.ref_mode == "cached")
    config = on_one_day(config, strategy, tokenizer)
    watchdog.phase("reading the data")
    sets = read_evaluation_sets(config, strategy, tokenizer, names)
    loaders = make_eval_loaders(config, strategy, sets)
    model, reference = prepare_models(config, strategy, names, prints, list(loaders.values()), watchdog, stop)
    measure_micro_batches(config, strategy, model, list(loaders.values()), watchdog, with_gradient=False)
    loss, results = KTOLoss.of(config.loss), {}
    stop.begin_training("after this forward")

    def between() -> None:
        watchdog.beat()
        stop_if_asked(strategy, stop)

    for name, loader in loaders.items():
        watchdog.phase(f"evaluating {name}")
        values = evaluate_set(model, reference, strategy, loss, name, loader, between)
        results[name] = {"rows": len(sets[name]), **values}
    strategy.barrier()
    return results


def find_models(config: RunConfig) -> tuple[Models, Any]:
    """Return where the policy and the reference are to be loaded from, and the policy's tokenizer."""
    from openkto.commands.build import Models, model_names
    from openkto.commands.rows import load_tokenizer_of
    from openkto.models.adapter import base_of
    from openkto.models.loading import check_same_vocabulary

    pretrain, reference = model_names(config)
    if config.model.ref_pretrain is None and config.model.ref_revision is None:
        reference = base_of(pretrain)
    tokenizer = load_tokenizer_of(config, pretrain)
    check_same_vocabulary(tokenizer, reference, config.model.trust_remote_code)
    return Models(pretrain, reference), tokenizer


def prepare_models(
    config: RunConfig,
    strategy: DeepspeedStrategy,
    names: Models,
    prints: dict[str, str],
    loaders: list[Any],
    watchdog: Watchdog,
    stop: StopRequest,
) -> tuple[Any, Any]:
    """Return the policy's engine and the reference, both checked, and tell the loaders how the policy runs rows."""
    from openkto.commands.build import check_forwards, load_models
    from openkto.commands.reference import cached_reference
    from openkto.commands.same_run import describe_models
    from openkto.trainer.planning import plan_for
    from openkto.trainer.reference import make_reference

    cached = None
    if config.model.ref_mode == "cached":
        cached = cached_reference(
            config, strategy, loaders, describe_models(names, prints), names.reference, watchdog, stop
        )
    watchdog.phase("loading the models")
    actor, ref_actor = load_models(config, strategy, names, is_cached=cached is not None, trains=False)
    model, ref_model = strategy.prepare_frozen(actor), None
    if ref_actor is not None:
        ref_model = strategy.prepare_frozen(ref_actor, offload=config.deepspeed.ref_offload)
    check_forwards(config, strategy, actor, ref_actor, ref_model)
    others = [] if ref_actor is None else [ref_actor]
    reference = make_reference(model, actor, cached or ref_model, strategy)
    plan_for(loaders, actor, *others, reference_runs=cached is None, by_token=config.loss.facts.by_token)
    return model, reference


def stop_if_asked(strategy: DeepspeedStrategy, stop: StopRequest) -> None:
    """End the command on all ranks, between two forwards, where any of them was asked to stop.

    Raises:
        StopError: one was.
    """
    if strategy.all_reduce([float(stop.reason is not None)], op="max")[0]:
        asked = enumerate(strategy.gather_objects(stop.reason))
        rank, reason = next((rank, reason) for rank, reason in asked if reason is not None)
        raise StopError(f"{reason} on rank {rank}: the evaluation has no numbers yet. Start the same command again.")


def table(results: dict[str, dict[str, float]]) -> str:
    """Return the results as text, a metric a line and a set a column."""
    metrics = list(dict.fromkeys(metric for values in results.values() for metric in values))
    width = max(len(metric) for metric in metrics)
    columns = {name: max(len(name), 10) for name in results}
    lines = [" ".join([" " * width, *(name.rjust(columns[name]) for name in results)])]
    for metric in metrics:
        cells = [
            (f"{values[metric]:.6g}" if metric in values else "-").rjust(columns[name])
            for name, values in results.items()
        ]
        lines.append(" ".join([metric.ljust(width), *cells]))
    return "\n".join(lines)


def output_file(config: RunConfig, options: RunOptions) -> Path:
    """Return where the numbers go: where that is said, else beside the model where a run left it."""
    if options.output is not None:
        return Path(options.output)
    has_run = "save_path" not in options.given and Path(config.model.pretrain, "run.yaml").is_file()
    return Path(config.model.pretrain if has_run else config.output.save_path, "evaluation.json")


def write_numbers(results: dict[str, Any], output: Path, *, replaces: bool) -> None:
    """Write the numbers; an earlier evaluation's are kept, unless the file was named to be replaced."""
    text = json.dumps(results, indent=2) + "\n"
    if not replaces and output.exists() and output.read_text(encoding="utf-8") != text:
        kept = output.rename(numbered(output))
        log.info("an earlier evaluation's numbers are kept as %s", kept)
    output.write_text(text, encoding="utf-8")
    log.info("the numbers are in %s", output)


def prepare_output(path: Path) -> Path:
    """Return the path when a file can be written there, before the work begins.

    Raises:
        ConfigError: it cannot.
    """
    try:
        make_writable(path.parent)
        if path.exists():
            path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written ({error.strerror}). Name another file.") from error
    return path
