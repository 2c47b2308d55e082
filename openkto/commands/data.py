"""The data sets of a command: prepared once per node, with log lines and warnings about them."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from openkto.batches.loader import check_pairable
from openkto.batches.pairing import fewest_collisions
from openkto.commands.build import Models
from openkto.commands.holdout import HELD_OUT, held_out, missing_classes, rows_of_split, warn_of_missing_classes
from openkto.commands.rows import read_rows
from openkto.commands.same_run import check_same_rows
from openkto.config import LossConfig, RunConfig, eval_sets, learning_rate_of, with_resolved
from openkto.data.balance import describe_balance, resolve_weights
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.holdout import halves, read_split
from openkto.distributed.agreement import on_some_ranks
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.errors import DataError
from openkto.models.loading import check_fits, load_config, stop_token_ids

log = logging.getLogger(__name__)
T = TypeVar("T")

# Those that `rewards/...` cannot be computed without.
CLASSES_OF_METRIC = {
    **dict.fromkeys(("rewards/auc", "rewards/margins"), ("desirable", "undesirable")),
    "rewards/chosen": ("desirable",),
    "rewards/rejected": ("undesirable",),
}
FRACTION_CURE = "Change the fraction or --seed, add rows"
FEW_PAIRS = 8  # with fewer, z_ref is mostly chance


def training_set(config: RunConfig, tokenizer: Any) -> UnpairedPreferenceDataset:
    """Return the rows to train on.

    Raises:
        DataError: the loss needs pairs of rows, and there is only one row.
    """
    data = config.data
    choice = held_out(config, is_training=True)
    rows = read_rows(
        data.dataset, data.dataset_split, config, tokenizer, data.dataset_probs, _ends(tokenizer), choice=choice
    )
    if choice is None:
        _check_pairs(config, rows, rows.name)
    else:
        _check_pairs(config, rows, f"--eval_fraction {choice.fraction:g}, the rows to train on", FRACTION_CURE)
    return rows


def evaluation_sets(config: RunConfig, tokenizer: Any) -> dict[str, UnpairedPreferenceDataset]:
    """Return the sets to evaluate on, by name.

    Raises:
        DataError: the loss needs pairs of rows, and a set has only one row.
    """
    data, sets = config.data, {}
    choice = held_out(config, is_training=False)
    if choice is not None:
        log.info("evaluation set %s, which --eval_fraction holds out:", HELD_OUT)
        sets[HELD_OUT] = read_rows(
            data.dataset, data.dataset_split, config, tokenizer, None, _ends(tokenizer), choice=choice
        )
        place = f"--eval_fraction {choice.fraction:g}, the held-out rows"
        _check_pairs(config, sets[HELD_OUT], place, FRACTION_CURE)
        warn_of_missing_classes(sets[HELD_OUT].report)
    for name, path in eval_sets(data).items():
        log.info("evaluation set %s:", name)
        split = read_split(path)
        if split is not None:
            sets[name] = rows_of_split(split, config, tokenizer, _ends(tokenizer))
        else:
            sets[name] = read_rows([path], data.eval_split, config, tokenizer, None, _ends(tokenizer))
        _check_pairs(config, sets[name], f"the evaluation set {name} ({sets[name].name})")
    if config.loss.facts.needs_z_ref:
        for name, rows in sets.items():
            _warn_of_pairs(rows, f"the evaluation set {name}")
    return sets


def _warn_of_pairs(rows: UnpairedPreferenceDataset, what: str) -> None:
    if len(rows) < FEW_PAIRS:
        log.warning("warning: %s Add rows to it.", few_pairs(len(rows), what))
    count = fewest_collisions(rows.prompt_keys, rows.completion_keys)
    if count > 0:
        log.warning("warning: %s Add more varied rows to it.", own_pairs(count, len(rows), what, "it"))


def warn_of_shared_prompts(
    rows: UnpairedPreferenceDataset | None, eval_rows: dict[str, UnpairedPreferenceDataset]
) -> None:
    """Warn of evaluation sets whose prompts are trained on, in whatever files they stand."""
    if rows is None or not eval_rows:
        return
    trained = halves(rows.prompt_digests())
    for name, held in eval_rows.items():
        count = int(np.isin(halves(held.prompt_digests()), trained).sum())
        if count:
            log.warning(
                "warning: the evaluation set %s: %d of its %d rows have a prompt that is trained on, so its numbers "
                "say little of other prompts. Leave such rows out, or hold rows out with --eval_fraction.",
                name,
                count,
                len(held),
            )


def _ends(tokenizer: Any) -> tuple[int, ...]:
    """Return where the generation of the tokenizer's model stops."""
    return stop_token_ids(tokenizer.name_or_path)


def _check_pairs(config: RunConfig, rows: UnpairedPreferenceDataset, place: str, cure: str = "Add rows") -> None:
    if config.loss.facts.needs_z_ref:
        check_pairable(len(rows), place, cure)


def few_pairs(count: int, what: str) -> str:
    """Say that z_ref is a mean over so few pairs."""
    return f"z_ref of {what} is a mean over {count} mismatched pairs, mostly chance below {FEW_PAIRS}."


def own_pairs(count: int, num_rows: int, what: str, half_of: str) -> str:
    """Say that so many pairs keep a text of their own row, which has the largest share of a batch or a set."""
    return (
        f"{count} of {num_rows} mismatched pairs of {what} ({100 * count / num_rows:.1f}%) hold a row's own prompt or "
        f"completion, whoever is paired with whom, since one text stands in over half of {half_of}: z_ref takes in the "
        "rows' own rewards."
    )


def check_sets(config: RunConfig, models: Models, sets: list[UnpairedPreferenceDataset]) -> None:
    """Check each set against the models that it will run through, policy and reference.

    Raises:
        ConfigError: a model cannot take its tokens.
    """
    for name in dict.fromkeys(models):
        model_config = load_config(name, config.model.trust_remote_code)
        for rows in sets:
            warning = check_fits(name, model_config, *rows.longest_and_largest())
            if warning is not None:
                log.warning("warning: %s", warning)


def check_has_metric(metric: str | None, eval_rows: dict[str, UnpairedPreferenceDataset]) -> None:
    """See that the first evaluation set has the classes that the metric of --keep_best is of.

    Raises:
        DataError: it lacks one.
    """
    if metric is None or not eval_rows:
        return
    name, rows = next(iter(eval_rows.items()))
    for kind in missing_classes(rows.report):
        if kind in CLASSES_OF_METRIC.get(metric, ()):
            raise DataError(
                f"--keep_best {metric}: needs {kind} rows in the evaluation set {name}; got none. Add some, or follow "
                "loss."
            )


def stops_of_model(pretrain: str, trust_remote_code: bool) -> tuple[int, ...]:
    """Return where the model's generation stops."""
    known = stop_token_ids(pretrain)
    if known:
        return known
    eos = load_config(pretrain, trust_remote_code).get_text_config().eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)


def stops_of_rows(rows: UnpairedPreferenceDataset, pretrain: str, trust_remote_code: bool) -> list[int]:
    """Return the special tokens that rows are taught to end with and at which the model does not stop; say them.

    A tenth of the rows must end so: a text may end in any token.
    """
    known = stops_of_model(pretrain, trust_remote_code)
    last = rows.last_scored_ids()
    ids, counts = np.unique(last, return_counts=True)
    special = rows.tokenizer.added_tokens_decoder
    found = [int(i) for i in ids[10 * counts >= len(last)] if int(i) in special and i not in known]
    for i in found:
        log.warning(
            "warning: rows end with %s (id %d), at which the model's generation does not stop: the saved "
            "generation_config.json names it among its eos_token_id.",
            special[i],
            i,
        )
    return found


def read_sets(
    config: RunConfig, strategy: DeepspeedStrategy, tokenizer: Any, models: Models
) -> tuple[UnpairedPreferenceDataset, dict[str, UnpairedPreferenceDataset]]:
    """Return the rows to train on and the sets to evaluate on, made once a node and checked; all ranks must call it.

    Raises:
        ConfigError, DataError: as `check_sets` and the sets themselves; the ranks have read different rows.
    """
    rows = made_once_a_node(strategy, lambda: training_set(config, tokenizer))
    return rows, read_evaluation_sets(config, strategy, tokenizer, models, rows)


def read_evaluation_sets(
    config: RunConfig,
    strategy: DeepspeedStrategy,
    tokenizer: Any,
    models: Models,
    rows: UnpairedPreferenceDataset | None = None,
) -> dict[str, UnpairedPreferenceDataset]:
    """Return the sets to evaluate on, and compare and check the training rows, if there are any, with them.

    Raises:
        ConfigError, DataError: as `read_sets`.
    """
    eval_rows = made_once_a_node(strategy, lambda: evaluation_sets(config, tokenizer))
    check_has_metric(config.checkpoint.keep_best, eval_rows)
    check_same_rows(strategy, rows, eval_rows)
    sets = [*([rows] if rows is not None else []), *eval_rows.values()]
    on_some_ranks(strategy, lambda: check_sets(config, models, sets), is_mine=True)
    warn_of_shared_prompts(rows, eval_rows)
    return eval_rows


def made_once_a_node(strategy: DeepspeedStrategy, make: Callable[[], T]) -> T:
    """Let the first rank of each node make what is cached, then the others find it.

    Raises:
        ConfigError, DataError: on every rank, where making failed on any.
    """
    made = on_some_ranks(strategy, make, is_mine=strategy.local_rank == 0)
    found = on_some_ranks(strategy, make, is_mine=made is None)
    given = found if made is None else made
    assert given is not None, "what is made is there"
    return given


def resolve(config: RunConfig, strategy: DeepspeedStrategy, rows: UnpairedPreferenceDataset) -> RunConfig:
    """Return the configuration with what follows from the device and the rows in the place of auto and of nothing.

    Raises:
        DataError: as `weights_of_classes`.
    """
    desirable, undesirable = weights_of_classes(config.loss, rows)
    return with_resolved(
        config,
        param_dtype=strategy.precision,
        learning_rate=learning_rate_of(config),
        desirable_loss_weight=desirable,
        undesirable_loss_weight=undesirable,
    )


def weights_of_classes(loss: LossConfig, dataset: UnpairedPreferenceDataset) -> tuple[float, float]:
    """Return the desirable and undesirable weight with `auto` resolved, and say the balance of the classes.

    Rows with weights of their own count with these.

    Raises:
        DataError: the loss has a term on desirable rows, and there are none.
    """
    report = dataset.report
    counts: tuple[float, float] = (report.desirable, report.undesirable)
    left_out = (report.left_out_desirable, report.left_out_undesirable)
    if loss.sft_loss_coef > 0 and report.desirable == 0:
        raise DataError(
            f"{dataset.name}: must hold desirable rows, which --sft_loss_coef needs; got none. Add some, or leave "
            "--sft_loss_coef out."
        )
    if (dataset.weights != 1).any():
        desirable, undesirable = (float(dataset.weights[dataset.labels == label].sum()) for label in (True, False))
        counts = round(desirable, 6), round(undesirable, 6)
        log.info("classes: each row counts with its own weight")
    weights = resolve_weights(loss.desirable_loss_weight, loss.undesirable_loss_weight, *counts)  # type: ignore[arg-type]
    line, warning = describe_balance(*weights, *counts, left_out=left_out)
    log.info("classes: %s", line)
    if warning is not None:
        log.warning("warning: %s", warning)
    return weights
