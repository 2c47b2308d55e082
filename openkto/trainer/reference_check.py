"""Whether the values that a cache holds are the reference model's: a sample of them is computed again.

Shapes:  B = rows in a micro-batch, P = pairs, S = pairs in the sample, C = columns.
Units:   nats.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from openkto.batches.batch import IntArray
from openkto.batches.loader import KTODataLoader
from openkto.batches.micro_batch import cut_pairs
from openkto.batches.pairs import sequence_key
from openkto.errors import CacheError
from openkto.trainer.forwards import is_real
from openkto.trainer.reference import CachedReference, ModelReference
from openkto.trainer.reference_cache import ReferenceCache

log = logging.getLogger(__name__)

PAIRS_TO_CHECK = 32  # of each data set
# How far a value and the model's may be apart: what other shapes of micro-batches make of round-off, with room.
RELATIVE_TOLERANCE = 1e-6
TOLERANCE_A_TOKEN = {"fp32": 1e-5, "bf16": 0.1, "fp16": 0.03}


def check_values(cache: ReferenceCache, model: Any, between: Callable[[], None]) -> None:
    """Compare a sample of the values that were read with the model's, before `fill` adds to them. All ranks call it.

    Raises:
        CacheError: they are not this model's.
    """
    found_SC = np.zeros((0, 4))
    for loader, needed_P2 in zip(cache.loaders, cache.needed, strict=True):
        pairs_S2 = sample_pairs(cache, loader, needed_P2)
        if len(pairs_S2):
            found_SC = np.concatenate([found_SC, _compare(cache, model, loader, pairs_S2, between)])
    if not len(found_SC):
        return
    row_S, cached_S, fresh_S, tokens_S = found_SC.T
    apart_S = np.abs(cached_S - fresh_S)
    allowed_S = TOLERANCE_A_TOKEN[cache.strategy.precision] * tokens_S + RELATIVE_TOLERANCE * np.abs(fresh_S)
    bad_S = ~(apart_S <= allowed_S)
    if bad_S.any():
        worst = int(np.argmax(apart_S / allowed_S))
        raise CacheError(
            f"--ref_cache_dir {cache.folder}: its log-probabilities must be the reference model's; got "
            f"{cached_S[worst]:.6g} nats where the model gives {fresh_S[worst]:.6g} (row {int(row_S[worst])}), and "
            f"{int(bad_S.sum())} of {len(bad_S)} checked are off. Delete that folder to compute them again."
        )
    log.info(
        "reference: %d cached values checked: at most %.2g nats, %.2g a token, from the model's in %s",
        len(apart_S),
        apart_S.max(),
        (apart_S / tokens_S).max(),
        cache.strategy.precision,
    )


def sample_pairs(cache: ReferenceCache, loader: KTODataLoader, needed_P2: IntArray) -> IntArray:
    """Return pairs whose value was read, spread over the data set; the same on every rank, as the values are."""
    spread_P = np.random.default_rng(loader.seed).permutation(len(needed_P2) if cache.values else 0)
    pairs: list[IntArray] = []
    for p in spread_P:
        if len(pairs) == PAIRS_TO_CHECK:
            break
        if sequence_key(*cut_pairs(loader.dataset, needed_P2[[p]])[0]) in cache.values:
            pairs.append(needed_P2[p])
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _compare(
    cache: ReferenceCache, model: Any, loader: KTODataLoader, pairs_S2: IntArray, between: Callable[[], None]
) -> np.ndarray:
    """Return (row, value, the model's, scored tokens) of these pairs, the same on every rank."""
    batches = loader.of_rank(pairs_S2, loader.plan_pairs(pairs_S2))
    fresh = ModelReference(model, cache.strategy).log_probs(batches, between)
    parts = []
    for batch, fresh_B, cached_B in zip(
        batches, fresh, CachedReference(cache.values, torch.device("cpu")).log_probs(batches, between), strict=True
    ):
        columns = (batch["row"], cached_B, fresh_B.cpu(), batch["loss_mask"].sum(1))
        parts.append(torch.stack([column.double() for column in columns], dim=1)[is_real(batch)])
    return cache.strategy.gather_rows(torch.cat(parts).to(cache.strategy.device))
