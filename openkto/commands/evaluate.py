"""`openkto evaluate`, `cli/evaluate_kto.py`: a policy against a reference on labelled rows, as a table and JSON."""

import json
import logging
from pathlib import Path

from openkto.config import is_adapter_folder, ref_is_adapter, with_resolved
from openkto.errors import ConfigError
from openkto.flags import parse

log = logging.getLogger(__name__)


def main(argv: list[str]) -> None:
    """Evaluate as the command line says.

    Raises:
        OpenKTOError: something that the user can act on.
    """
    config, options = parse(argv, "evaluate")
    output = prepare_output(Path(options.output or Path(config.output.save_path) / "evaluation.json"))
    from openkto.commands.data import check_sets, evaluation_sets, made_once_a_node
    from openkto.commands.train import (
        HEAD_TOLERANCE,
        check_reference,
        load_actor,
        load_tokenizer_of,
        make_eval_loaders,
        make_strategy,
        measure_micro_batches,
        model_names,
    )
    from openkto.distributed.watchdog import Watchdog
    from openkto.models.adapter import base_of
    from openkto.models.loading import check_same_vocabulary
    from openkto.models.loss import KTOLoss
    from openkto.trainer.evaluation import evaluate_set
    from openkto.trainer.reference import make_reference

    # Without an optimizer stages 0 to 2 are one; the autocast of stage 0 is for training.
    config = with_resolved(config, zero_stage=max(1, config.deepspeed.zero_stage))
    pretrain, reference = model_names(config)
    is_own_reference = ref_is_adapter(config.model, has_adapter=is_adapter_folder(pretrain))
    if config.model.ref_pretrain is None:
        reference = base_of(pretrain)
    tokenizer = load_tokenizer_of(config, pretrain)
    if pretrain == reference:
        log.warning("warning: %s is compared with itself; name what it was trained from as --ref_pretrain.", pretrain)
    else:
        check_same_vocabulary(tokenizer, reference, config.model.trust_remote_code)
    strategy = make_strategy(config)
    strategy.setup_distributed()
    sets = made_once_a_node(strategy, lambda: evaluation_sets(config, tokenizer))
    check_sets(config, (pretrain, reference), list(sets.values()))
    with strategy.model_loading():
        actor = load_actor(config, pretrain, strategy.load_dtype, trains=False)
        ref_actor = None if is_own_reference else load_actor(config, reference, strategy.load_dtype, trains=False)
    model, ref_model = strategy.prepare_frozen(actor), None
    if ref_actor is not None:
        ref_model = strategy.prepare_frozen(ref_actor, offload=config.deepspeed.ref_offload)
    actor.check_forward(HEAD_TOLERANCE[strategy.precision])
    if ref_actor is not None:
        check_reference(config, strategy, ref_actor, ref_model)
    settings, results = config.loss, {}
    weights = float(settings.desirable_loss_weight), float(settings.undesirable_loss_weight)
    loss = KTOLoss(
        settings.beta,
        *weights,
        loss_type=settings.loss_type,  # type: ignore[arg-type]  # checked by the parser
        label_smoothing=settings.label_smoothing,
        sft_loss_coef=settings.sft_loss_coef,
        humanline_low=settings.humanline_low,
        humanline_high=settings.humanline_high,
    )
    source = make_reference(model, actor, ref_model, strategy)
    loaders = make_eval_loaders(config, strategy, sets)
    measure_micro_batches(config, strategy, model, list(loaders.values()), Watchdog(0, 0), with_gradient=False)
    for name, loader in loaders.items():
        loader.packed = actor.packs
        values = evaluate_set(model, source, strategy, loss, name, loader, between=lambda: None)
        results[name] = {"rows": len(sets[name]), **values}
    if strategy.rank == 0:
        print(table(results))
        output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        log.info("the numbers are in %s", output)
    strategy.barrier()


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


def prepare_output(path: Path) -> Path:
    """Return the path when a file can be written there, before the work begins.

    Raises:
        ConfigError: it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written ({error.strerror}). Name another file.") from error
    return path
