"""`openkto precompute_reference`, `cli/precompute_reference.py`: the reference's log-probabilities of a run to come."""

import logging
import os

from openkto.flags import parse

log = logging.getLogger(__name__)


def main(argv: list[str]) -> None:
    """Fill the cache for the training run of the command line; its flags are those of `openkto train`.

    Raises:
        OpenKTOError: something that the user can act on.
    """
    config, options = parse(argv, "precompute_reference")
    for line in options.warnings:
        log.warning("warning: %s", line)
    from openkto.commands.data import check_sets, evaluation_sets, made_once_a_node, training_set
    from openkto.commands.reference import fill_and_check, open_cache
    from openkto.commands.resume import identity_of_command
    from openkto.commands.train import check_data, check_models, make_loaders, make_strategy, model_names
    from openkto.distributed.watchdog import Watchdog

    models = model_names(config)
    tokenizer = check_models(config, *models)
    strategy = make_strategy(config)
    if options.check or options.preview:
        if os.environ.get("RANK", "0") == "0":
            check_data(config, options, models, tokenizer)
        return
    with Watchdog(config.checkpoint.stall_minutes, int(os.environ.get("RANK", "0"))) as watchdog:
        strategy.setup_distributed()
        rows = made_once_a_node(strategy, lambda: training_set(config, tokenizer))
        eval_rows = made_once_a_node(strategy, lambda: evaluation_sets(config, tokenizer))
        check_sets(config, models, [rows, *eval_rows.values()])
        loader, eval_loaders = make_loaders(config, strategy, rows, eval_rows)
        identity = identity_of_command(config, strategy, rows, models)
        cache = open_cache(config, strategy, [loader, *eval_loaders.values()], identity)
        cache.look_up()
        fill_and_check(cache, config, strategy, models[1], watchdog)
        log.info("all %d pairs of the run are in %s", cache.num_needed, cache.folder)
        strategy.barrier()
