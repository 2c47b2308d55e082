"""A model that gives NaN for rows beyond a length, and the order in which only one pair is that long."""

import torch
import transformers

from openkto.batches.batch import epoch_order
from tests.tiny import VOCABULARY


def no_position_past(length: int) -> transformers.PreTrainedModel:
    """Return a model that gives nan where a row is longer."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.wpe.weight.data[length:] = torch.nan
    return model


def seed_that_pairs(prompt_of: int, completion_of: int, rows: int) -> int:
    """Return a seed under which a batch of all rows pairs one's prompt with another's completion: the one before it."""
    for seed in range(99):
        order = epoch_order(rows, seed, 0).tolist()
        if order[order.index(prompt_of) - 1] == completion_of:
            return seed
    raise AssertionError("no seed of a hundred pairs these rows")
