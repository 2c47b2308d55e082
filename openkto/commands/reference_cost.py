"""How many tokens a reference runs in a start of a run, in the loop or to fill its cache: what `auto` compares.

Shapes:  P = pairs, N = rows in a global batch.
"""

import numpy as np
import torch

from openkto.batches.batch import IntArray
from openkto.batches.loader import KTODataLoader
from openkto.batches.pairs import pairs_by_step
from openkto.batches.sharing import least_tokens, sharable_prompts
from openkto.config import RunConfig
from openkto.models.loading import choose_attention
from openkto.models.packed_attention import PACKED
from openkto.trainer.planning import pairs_run_together
from openkto.trainer.reference_cache import ReferenceCache
from openkto.trainer.reference_check import sample_pairs
from openkto.trainer.schedule import is_due, total_steps


def may_share_prompts(config: RunConfig, dtype: torch.dtype) -> bool:
    """Return whether forwards without gradient run a prompt once, as far as the settings tell.

    What the model itself allows is known once it is loaded, which is after the choice.
    """
    model = config.model
    attention = choose_attention(model.attn_implementation, dtype)
    is_apart = "off" in (model.share_prompts, model.packing) or config.deepspeed.sequence_parallel_size > 1
    return not is_apart and attention in ("", PACKED)


def loop_tokens(
    config: RunConfig, loader: KTODataLoader, eval_loaders: list[KTODataLoader], precision: str, *, shares: bool
) -> int:
    """Return the tokens that a reference in the loop surely runs in a run's first start.

    Args:
        loader: of the training rows.
        eval_loaders: of the sets that are evaluated on.
        precision: in which the models compute.
        shares: whether prompts are shared, from `may_share_prompts`.
    """
    steps = sure_steps(config, loader)
    together = shares and pairs_run_together(config.model.share_prompts, precision)
    trained = sum(
        _step_tokens(loader, *pairs, shares=shares, together=together) for pairs in pairs_by_step(loader, steps)
    )
    evaluated = sum(
        _step_tokens(one, *pairs, shares=shares, together=shares)
        for one in eval_loaders
        for pairs in pairs_by_step(one, 1)
    )
    return trained + evaluations_in(config, len(loader), steps) * evaluated


def cache_tokens(cache: ReferenceCache, *, shares: bool) -> int:
    """Return the tokens that it takes to check what a cache holds, and to fill in what is missing."""
    tokens = 0
    for loader, needed_P2, missing in zip(cache.loaders, cache.needed, cache.missing, strict=True):
        tokens += _tokens(loader, sample_pairs(cache, loader, needed_P2), shares=shares)
        tokens += _tokens(loader, missing.pairs_P2, shares=shares)
    return tokens


def _step_tokens(loader: KTODataLoader, own_N2: IntArray, pairs_N2: IntArray, *, shares: bool, together: bool) -> int:
    """Return the tokens that a reference runs for a batch's own and mismatched pairs, apart or together."""
    if together:
        return _tokens(loader, np.concatenate([own_N2, pairs_N2]), shares=True)
    # The rows themselves lie as the policy runs them, with gradient.
    return _tokens(loader, own_N2, shares=shares) + _tokens(loader, pairs_N2, shares=shares)


def _tokens(loader: KTODataLoader, pairs_P2: IntArray, *, shares: bool) -> int:
    lengths_P = loader.pair_lengths(pairs_P2[:, 0], pairs_P2[:, 1])
    if not shares:
        return int(lengths_P.sum())
    prompt_P = sharable_prompts(loader.dataset, pairs_P2, lengths_P)
    return least_tokens(lengths_P, prompt_P, loader.dataset.prompt_keys[pairs_P2[:, 0]])


def sure_steps(config: RunConfig, loader: KTODataLoader) -> int:
    """Return how many steps the first start makes at least: it may end early."""
    train, patience = config.train, config.checkpoint.early_stop_patience
    total = total_steps(len(loader), train.max_epochs, train.max_steps)
    last = min(total, train.stop_after_steps or total)
    if patience is None:
        return last
    # The first evaluation is the best so far.
    every = train.eval_steps if train.eval_steps > 0 else len(loader)
    return min(last, (patience + 1) * every)


def evaluations_in(config: RunConfig, steps_per_epoch: int, steps: int) -> int:
    """Return how often the sets are evaluated in the first steps, of which the last ends the start."""
    train = config.train
    at_start = int(train.eval_at_start)
    if train.eval_steps == 0:
        return at_start
    due = sum(is_due(train.eval_steps, step, steps_per_epoch) for step in range(1, steps + 1))
    return at_start + due + int(not is_due(train.eval_steps, steps, steps_per_epoch))
