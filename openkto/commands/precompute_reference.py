"""`openkto precompute_reference`, `cli/precompute_reference.py`: fills the reference cache."""

import logging
import os

from openkto.config.flags import parse
from openkto.process.stops import StopRequest

log = logging.getLogger(__name__)


def main(argv: list[str]) -> None:
    """Fill the cache for the training run of the command line; its flags are those of `openkto train`.

    Raises:
        OpenKTOError: something that the user can act on.
    """
    config, options = parse(argv, "precompute_reference")
    for line in options.warnings:
        log.warning("warning: %s", line)
    from openkto.commands.build import check_models, make_loaders, make_strategy, model_names
    from openkto.commands.check import is_check
    from openkto.commands.data import read_sets
    from openkto.commands.reference import fill_and_check, open_cache
    from openkto.commands.resume import identity_of_command, on_one_day
    from openkto.commands.same_run import fetch_models, settings_of
    from openkto.process.watchdog import Watchdog

    models = model_names(config)
    tokenizer = check_models(config, models)
    strategy = make_strategy(config)
    if is_check(config, options, models, tokenizer):
        return
    dog = Watchdog(config.checkpoint.stall_minutes, int(os.environ.get("RANK", "0")))
    with StopRequest() as stop, dog as watchdog:
        strategy.setup_distributed(settings_of(config))
        watchdog.phase("fetching the models")
        fetch_models(strategy, models)
        config = on_one_day(config, strategy, tokenizer)
        watchdog.phase("reading the data")
        rows, eval_rows = read_sets(config, strategy, tokenizer, models)
        loader, eval_loaders = make_loaders(config, strategy, rows, eval_rows)
        identity = identity_of_command(config, strategy, rows, models)
        cache = open_cache(config, strategy, [loader, *eval_loaders.values()], identity)
        cache.look_up()
        fill_and_check(cache, config, strategy, models.reference, watchdog, stop)
        log.info("all %d pairs of the run are in %s", cache.num_needed, cache.folder)
        strategy.barrier()
