"""Uses or fills the reference cache before a training command loads the policy."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from openkto.batches.loader import KTODataLoader
from openkto.commands.build import check_reference, load_actor, measure_micro_batches
from openkto.commands.reference_cost import cache_tokens, loop_tokens, may_share_prompts
from openkto.config import RunConfig, may_be_cached, trains_adapter
from openkto.data.cache import default_cache_dir
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.errors import CacheError
from openkto.models.loading import choose_attention
from openkto.process.stops import StopRequest
from openkto.process.watchdog import Watchdog
from openkto.trainer.planning import plan_for
from openkto.trainer.reference import CachedReference
from openkto.trainer.reference_cache import ReferenceCache
from openkto.trainer.reference_check import check_values
from openkto.trainer.schedule import total_steps

log = logging.getLogger(__name__)

FORMAT_VERSION = 1  # to be raised whenever the same pair of the same model gets another key or value


def cached_reference(
    config: RunConfig,
    strategy: DeepspeedStrategy,
    loaders: list[KTODataLoader],
    identity: dict[str, Any],
    model: str,
    watchdog: Watchdog,
    stop: StopRequest,
    resumed: dict[str, Any] | None = None,
) -> CachedReference | None:
    """Return the cached reference, filled and checked, or nothing where the run takes another; all ranks must call it.

    The reference model is in memory only inside.

    Args:
        loaders: of the training rows, then of each evaluation set.
        identity: from `identity_of_command`.
        model: the reference's name.
        resumed: what the checkpoint that is resumed from keeps of the run.

    Raises:
        CacheError: the cache cannot be read or written, or its values are not this model's. With --ref_mode auto that
            is a warning, and another reference is taken.
        ConfigError: the reference cannot be loaded or run, which it must be in any mode.
        TrainingError: a log-probability is not finite.
        StopError: on every rank, where any was asked to stop while the cache filled.
    """
    if not may_be_cached(config, has_adapter=trains_adapter(config)):
        return None
    try:
        if config.model.ref_mode == "cached":
            cache = open_cache(config, strategy, loaders, identity)
            cache.look_up()
        else:
            chosen = choose_cache(config, strategy, loaders, identity, resumed)
            if chosen is None:
                return None
            cache = chosen
        fill_and_check(cache, config, strategy, model, watchdog, stop)
    except CacheError as error:
        if config.model.ref_mode != "auto":
            raise
        log.warning("warning: the reference's cache is not used: %s", error)
        return None
    return cache.reference()


def choose_cache(
    config: RunConfig,
    strategy: DeepspeedStrategy,
    loaders: list[KTODataLoader],
    identity: dict[str, Any],
    resumed: dict[str, Any] | None,
) -> ReferenceCache | None:
    """Return the cache where it runs no more tokens than a model in the loop; say which.

    A run that is resumed keeps what it has, so that it goes on to the same bits.
    """
    was_cached = None if resumed is None else resumed.get("is_cached")
    if was_cached is False:
        return None
    train = config.train
    loader, eval_loaders = loaders[0], loaders[1:] if train.eval_steps != 0 or train.eval_at_start else []
    cache = open_cache(config, strategy, [loader, *eval_loaders], identity)
    cache.look_up()
    if cache.num_missing == 0:
        log.info("reference: from the cache, which holds all %d pairs (--ref_mode auto)", cache.num_needed)
        return cache
    if resumed is not None:
        # A run of an earlier version filled no cache by itself.
        return cache if was_cached else None
    shares = may_share_prompts(config, strategy.load_dtype)
    cost = cache_tokens(cache, shares=shares)
    in_loop = loop_tokens(config, loader, eval_loaders, strategy.precision, shares=shares)
    if cost > in_loop:
        log.info(
            "reference: in the loop, for %d tokens or more; a cache would take %d (--ref_mode auto)", in_loop, cost
        )
        return None
    return cache


def open_cache(
    config: RunConfig, strategy: DeepspeedStrategy, loaders: list[KTODataLoader], identity: dict[str, Any]
) -> ReferenceCache:
    """Return the cache of this run's reference, in a folder of everything beside tokens that its values depend on."""
    about = {
        "format": FORMAT_VERSION,
        "model files": identity["reference_files"],
        "param_dtype": strategy.precision,
        "dtype of the parameters": str(strategy.load_dtype).removeprefix("torch."),
        "load_in_4bit": config.lora.load_in_4bit,
        "attention": choose_attention(config.model.attn_implementation, strategy.load_dtype) or "auto",
        "packing": config.model.packing,
        "device": strategy.device.type,
    }
    kernels = [name for name in ("use_liger_kernel", "torch_compile") if vars(config.model)[name]]
    if kernels:
        about["kernels"] = kernels
    root = config.model.ref_cache_dir
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    folder = (default_cache_dir() / "ref" if root is None else Path(root).expanduser()) / name
    steps = total_steps(len(loaders[0]), config.train.max_epochs, config.train.max_steps)
    return ReferenceCache(folder, about, strategy, loaders, steps)


def fill_and_check(
    cache: ReferenceCache,
    config: RunConfig,
    strategy: DeepspeedStrategy,
    model: str,
    watchdog: Watchdog,
    stop: StopRequest,
) -> None:
    """Load the reference, compare what is cached with it, compute what is missing, and free the model again."""
    if cache.num_missing > 0:
        why = " once, no more tokens than in the loop (--ref_mode auto)" if config.model.ref_mode == "auto" else ""
        log.info("reference: computing %d of %d pairs%s", cache.num_missing, cache.num_needed, why)
    watchdog.phase("loading the reference")
    with strategy.model_loading():
        actor = load_actor(config, model, strategy.load_dtype, trains=False)
    with strategy.passing_model(actor) as prepared:
        check_reference(config, strategy, actor, prepared)
        plan_for(cache.loaders, actor)
        measure_micro_batches(config, strategy, prepared, cache.loaders, watchdog, with_gradient=False)
        watchdog.phase("filling the reference's cache")
        with stop.noting("after a few micro-batches"):
            check_values(cache, prepared, watchdog.beat)
            cache.fill(prepared, watchdog.beat, stop)
