"""How many tokens a reference runs, in the loop or for its cache: what `--ref_mode auto` compares."""

from dataclasses import replace

import pytest
import torch

from openkto.batches.loader import KTODataLoader
from openkto.commands.reference_cost import cache_tokens, loop_tokens, may_share_prompts
from openkto.config import from_flat
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.trainer.reference_cache import ReferenceCache
from tests.ranks import run_ranks
from tests.tiny import TokenRowList, token_rows

# 20 rows in steps of 8, 8 and 4, each with its own and a mismatched completion.
STEPS = [8, 8, 4]


def equal_rows(count: int, prompt: int, completion: int) -> TokenRowList:
    """Return rows of distinct prompts of this many tokens, and completions of that many."""
    rows = token_rows([i % 2 == 0 for i in range(count)])
    for i, item in enumerate(rows.items):
        item["prompt_ids"], item["completion_ids"] = [4 + i] * prompt, [4 + i] * completion
        item["completion_mask"] = [True] * completion
    return TokenRowList(rows.items, rows.prompt_keys)


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
def test_the_tokens_of_a_reference_in_the_loop(settings, rows, evaluations):
    config = from_flat({"pretrain": "m", "train_batch_size": 8, **settings})
    loader = KTODataLoader(equal_rows(20, 5, 7), 8, 4)
    evaluated = [KTODataLoader(equal_rows(7, 5, 7), None, 4)]
    assert len(loader) == len(STEPS)
    # A prompt of 5 tokens and two completions of 7: 24 tokens with the prompt twice, 19 with it once.
    assert loop_tokens(config, loader, evaluated, "fp32", shares=False) == 24 * rows + 24 * 7 * evaluations
    assert loop_tokens(config, loader, evaluated, "fp32", shares=True) == 19 * rows + 19 * 7 * evaluations
    # In half precision only evaluation runs both in one forward.
    assert loop_tokens(config, loader, evaluated, "bf16", shares=True) == 24 * rows + 19 * 7 * evaluations


def test_a_loss_without_z_ref_takes_each_row_once():
    loader = KTODataLoader(equal_rows(20, 5, 7), 8, 4, needs_mismatched=False)
    assert loop_tokens(from_flat({"pretrain": "m", "train_batch_size": 8}), loader, [], "fp32", shares=True) == 12 * 20


@pytest.mark.parametrize(
    ("answers", "truncation"), [(2, "completion"), (3, "completion"), (20, "completion"), (3, "prompt")]
)
def test_the_tokens_are_those_that_the_loader_lays_out(answers, truncation):
    rows = token_rows([True, False] * 10, longest=12, answers=answers)
    rows.max_len, rows.truncation = 16, truncation
    loader = KTODataLoader(rows, 20, 40)
    shares = {"shares_prompts": True, "shares_pairs": True, "shares_matched": True}
    loader.layout = replace(loader.layout, packed=True, **shares)
    (batch,) = loader
    runs = [sum(len(m[f"{prefix}token_index"]) for m in found) for found, prefix in
            ((batch.shared, ""), (batch.matched, ""), (batch.mismatched, "kl_"))]  # fmt: skip
    config = from_flat({"pretrain": "m", "train_batch_size": 20, "eval_steps": 0})
    assert loop_tokens(config, loader, [], "fp32", shares=True) == runs[0]
    assert loop_tokens(config, loader, [], "bf16", shares=True) == runs[1] + runs[2]


def tokens_of_a_cache(folder, shares):
    """Return the tokens that an empty cache takes for three epochs, and what a start of one epoch runs in the loop."""
    strategy = DeepspeedStrategy(param_dtype="fp32")
    strategy.setup_distributed()
    loader = KTODataLoader(equal_rows(20, 30, 2), 8, 4)
    cache = ReferenceCache(folder, {}, strategy, [loader], 9)
    cache.look_up()
    config = from_flat(
        {"pretrain": "m", "train_batch_size": 8, "max_epochs": 3, "eval_steps": 1, "early_stop_patience": 2}
    )
    in_loop = loop_tokens(config, loader, [], "bf16", shares=shares)
    return cache.num_missing, cache_tokens(cache, shares=shares), in_loop


def test_a_cache_of_long_prompts_costs_less_than_its_pairs_say(tmp_path):
    ((pairs, without, in_loop),) = run_ranks(tokens_of_a_cache, 1, tmp_path, tmp_path / "ref", False)
    # A run that may end after an epoch would have computed the mismatched pairs of three.
    assert (without, in_loop) == (32 * pairs, 32 * 2 * 20)
    assert without > in_loop
    ((_, shared, in_loop),) = run_ranks(tokens_of_a_cache, 1, tmp_path, tmp_path / "ref", True)
    assert (shared, in_loop) == (20 * 30 + 2 * pairs, 32 * 2 * 20)
    assert shared < in_loop


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({}, True),
        ({"share_prompts": "off"}, False),
        ({"packing": "off"}, False),
        ({"attn_implementation": "sdpa"}, False),
        ({"sequence_parallel_size": 2}, False),
    ],
)
def test_the_settings_tell_whether_prompts_may_be_shared(settings, shares):
    assert may_share_prompts(from_flat({"pretrain": "m", **settings}), torch.float32) is shares
