"""How many forwards of rows a reference in the loop makes: what a cache is compared with."""

import pytest

from openkto.batches.loader import KTODataLoader
from openkto.commands.reference_cost import loop_forwards
from openkto.config import from_flat
from tests.tiny import token_rows

# 20 rows in steps of 8, 8 and 4; two forwards a row, with its mismatched completion.
STEPS = [8, 8, 4]


@pytest.mark.parametrize(
    ("settings", "rows", "evaluations"),
    [
        ({}, 20, 1),
        ({"max_epochs": 2}, 40, 2),
        ({"max_epochs": 2, "eval_steps": 0}, 40, 0),
        ({"max_epochs": 2, "eval_steps": 2, "eval_at_start": True}, 40, 4),  # before the first, after 2, 4 and 6
        ({"max_epochs": 2, "stop_after_steps": 4}, 28, 2),  # after the epoch, and where it stops
        ({"max_steps": 2}, 16, 1),
        # A run that may end early surely makes two evaluations, and so two steps of eight rows.
        ({"max_epochs": 2, "eval_steps": 1, "early_stop_patience": 1}, 16, 2),
    ],
)
def test_the_forwards_of_a_reference_in_the_loop(settings, rows, evaluations):
    config = from_flat({"pretrain": "m", "train_batch_size": 8, **settings})
    loader = KTODataLoader(token_rows([True, False] * 10), 8, 4)
    evaluated = KTODataLoader(token_rows([True] * 7), None, 4)
    assert len(loader) == len(STEPS)
    assert loop_forwards(config, loader, [evaluated]) == 2 * rows + 2 * 7 * evaluations
