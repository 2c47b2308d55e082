"""All (prompt, completion) pairs whose reference log-probabilities a run needs, known before it starts.

Order and pairing are functions of (seed, epoch), so nothing has to be trained to know them.

Shapes:  N = rows in a global batch, P = pairs, B = rows in a micro-batch.
"""

import hashlib
from collections.abc import Iterator

import numpy as np

from openkto.batches.batch import IntArray
from openkto.batches.loader import KTODataLoader
from openkto.batches.micro_batch import MicroBatch


def pairs_of_run(loader: KTODataLoader, total_steps: int) -> IntArray:
    """Return the different pairs of a run's first steps, [P, 2]: whose prompt and whose completion, in the data set."""
    n, codes = max(loader.num_rows, 1), [np.zeros(0, dtype=np.int64)]
    for step, pairs in enumerate(pairs_by_step(loader, total_steps), start=1):
        codes += [pairs_N2[:, 0] * n + pairs_N2[:, 1] for pairs_N2 in pairs]
        if step % len(loader) == 0:
            codes = [np.unique(np.concatenate(codes))]
    return np.stack(np.divmod(np.unique(np.concatenate(codes)), n), axis=1)


def pairs_by_step(loader: KTODataLoader, total_steps: int) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield of each of a run's first steps the rows' own pairs and the mismatched ones, [N, 2] each.

    There are no mismatched ones where the loss takes none.
    """
    for epoch in range(-(-total_steps // max(len(loader), 1))):
        order = loader.order(epoch)
        for b in range(min(len(loader), total_steps - epoch * len(loader))):
            yield loader.pairs_of(order[loader.bounds[b] : loader.bounds[b + 1]])


def sequence_key(prompt_ids: list[int], completion_ids: list[int], completion_mask: list[bool]) -> bytes:
    """Return 16 bytes that tell a pair by all that its log-probability depends on beside the model."""
    mask = [False] * len(prompt_ids) + completion_mask
    return _digest(np.array(prompt_ids + completion_ids, dtype=np.int64), np.array(mask, dtype=np.bool_))


def batch_keys(micro_batch: MicroBatch) -> list[bytes]:
    """Return the `sequence_key` of each row of a micro-batch, [B]."""
    lengths_B = micro_batch["attention_mask"].sum(1).tolist()
    rows = zip(micro_batch["input_ids"], micro_batch["loss_mask"], lengths_B, strict=True)
    return [_digest(ids_T[:length].numpy(), mask_T[:length].numpy()) for ids_T, mask_T, length in rows]


def _digest(ids_T: IntArray, mask_T: np.ndarray) -> bytes:
    return hashlib.sha256(ids_T.tobytes() + mask_T.tobytes()).digest()[:16]
