"""`--check` and `--preview`: checks the configuration and the data, without loading a model's weights."""

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from openkto.commands.build import Models
from openkto.commands.data import (
    check_has_metric,
    check_sets,
    evaluation_sets,
    stops_of_rows,
    training_set,
    warn_of_shared_prompts,
    weights_of_classes,
)
from openkto.commands.outlook import say_outlook
from openkto.commands.push import check_push
from openkto.commands.samples import choose_prompts
from openkto.config import RunConfig, is_adapter_folder, may_be_cached, ref_is_adapter, trains_adapter
from openkto.config.run_options import RunOptions
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.models.empty import describe_adapter
from openkto.models.loading import load_config

log = logging.getLogger(__name__)


def is_check(config: RunConfig, options: RunOptions, models: Models, tokenizer: Any, *, trains: bool = True) -> bool:
    """Return whether this start is to check or show the data and no more; the first rank has then done so.

    Args:
        models: where the policy and the reference are loaded from.
        trains: whether there are rows to train on, or only some to evaluate on.

    Raises:
        ConfigError, DataError: what is found to be wrong.
    """
    if not (options.check or options.preview):
        return False
    if os.environ.get("RANK", "0") == "0":
        rows = check_training(config, models, tokenizer) if trains else None
        evaluated = check_evaluation(config, models, tokenizer, rows)
        sets = [*([rows] if rows is not None else []), *evaluated.values()]
        if trains:
            choose_prompts(config, tokenizer, evaluated)
            check_push(config.output, makes=False)
        if options.preview:
            shown = [rows.preview(options.preview, has_colour=sys.stdout.isatty()) for rows in sets[:1]]
            print("\n\n".join(shown))
        log.info("the configuration and the data are fine")
    return True


def check_training(config: RunConfig, models: Models, tokenizer: Any) -> UnpairedPreferenceDataset:
    """Read the rows to train on, and say what there is to say of them, the models and the run."""
    log.info("models: %s", describe_models(config, models))
    if trains_adapter(config):
        on = describe_adapter(models.policy, config.lora, config.model.trust_remote_code)
        log.info("the adapter is on %s", on)
    return checked_rows(config, models, tokenizer, say_outlook)


def checked_rows(
    config: RunConfig,
    models: Models,
    tokenizer: Any,
    outlook: Callable[[RunConfig, UnpairedPreferenceDataset], None],
) -> UnpairedPreferenceDataset:
    """Return the rows to train on, and warn of or refuse what the run would; `outlook` says what they make of it."""
    rows = training_set(config, tokenizer)
    check_sets(config, models, [rows])
    weights_of_classes(config.loss, rows)
    outlook(config, rows)
    stops_of_rows(rows, models.policy, config.model.trust_remote_code)
    return rows


def check_evaluation(
    config: RunConfig, models: Models, tokenizer: Any, rows: UnpairedPreferenceDataset | None
) -> dict[str, UnpairedPreferenceDataset]:
    """Read the sets to evaluate on, by name, and say what there is to say of them.

    Args:
        rows: those to train on, if there are any.
    """
    sets = evaluation_sets(config, tokenizer)
    check_has_metric(config.checkpoint.keep_best, sets)
    check_sets(config, models, list(sets.values()))
    warn_of_shared_prompts(rows, sets)
    return sets


def describe_models(config: RunConfig, models: Models) -> str:
    """Say what is trained from what, against what."""
    kind = load_config(models.policy, config.model.trust_remote_code).model_type
    has_adapter = trains_adapter(config)
    trained = f"an adapter of rank {config.lora.lora_rank} on" if config.lora.lora_rank else "all parameters of"
    if is_adapter_folder(models.policy):
        trained = "the adapter"
    if ref_is_adapter(config.model, has_adapter=has_adapter):
        reference = "the policy at the start of training"
    elif may_be_cached(config, has_adapter=has_adapter) and config.model.ref_mode == "cached":
        reference = f"{models.reference}, from the cache"
    else:
        reference = models.reference
    return f"trained: {trained} {models.policy} ({kind}); the reference: {reference}"
