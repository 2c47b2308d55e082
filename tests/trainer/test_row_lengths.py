"""Models whose positions depend on the longest row of a forward: each row counts as if it ran by itself."""

import functools
import json
import logging
from itertools import chain

import numpy as np
import pytest
import torch
import transformers

from openkto.batches.loader import KTODataLoader
from openkto.errors import ConfigError
from openkto.models import Actor
from openkto.models.loading import check_fits
from openkto.models.positions import RowLengths, row_lengths
from openkto.trainer.planning import plan_for
from tests.helpers.definition import replay
from tests.helpers.records import lines
from tests.ranks import run_ranks
from tests.tiny import VOCABULARY, Oracle, TokenRowList, make_trainer, quiet_args, tiny_llama, token_rows

FIRST, LONGEST = 12, 40
LABELS = [True, False, True, True, False, False, True, False]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.5, 5.0, 9.0],
    "original_max_position_embeddings": FIRST,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def tiny_phi3(seed: int = 0, first: int = FIRST) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = transformers.Phi3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, original_max_position_embeddings=first, pad_token_id=0,
        rope_parameters=LONGROPE | {"original_max_position_embeddings": first}, attention_dropout=0.0,
    )  # fmt: skip
    model = transformers.Phi3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def long_and_short_rows():
    return token_rows(LABELS, seed=5, longest=LONGEST // 2)


def train(folder):
    rows = long_and_short_rows()
    trainer, _ = make_trainer(rows, model=tiny_phi3, batch=8, micro=8, lr=1e-3, steps=3, eval_rows=rows)
    trainer.fit(quiet_args(folder, 3, log_batches=True))


def train_at_full_length(folder, micro):
    """Train on rows of 77 to 486 tokens, half the answers, with a first length of 256."""
    random = np.random.default_rng(3)
    items = token_rows([True, False] * 8).items
    for item, length in zip(items, np.linspace(77, 486, len(items)).astype(int), strict=True):
        item["prompt_ids"] = random.integers(3, VOCABULARY, length // 2).tolist()
        item["completion_ids"] = random.integers(3, VOCABULARY, length - length // 2).tolist()
        item["completion_mask"] = [True] * len(item["completion_ids"])
    rows = TokenRowList(items, np.arange(len(items)), max_len=512)
    model = functools.partial(tiny_phi3, first=256)
    trainer, _ = make_trainer(rows, model=model, batch=16, micro=micro, lr=1e-3, steps=3)
    trainer.fit(quiet_args(folder, 3))


@pytest.mark.slow
def test_micro_batches_of_any_size_give_longrope_the_same_steps(tmp_path):
    for micro in (1, 8):
        run_ranks(train_at_full_length, 1, tmp_path, tmp_path / str(micro), micro)
    one, eight = (
        [
            (line["loss"], line["grad_norm"])
            for line in map(json.loads, path.read_text().splitlines())
            if line["kind"] == "train"
        ]
        for path in (tmp_path / "1/metrics.jsonl", tmp_path / "8/metrics.jsonl")
    )
    assert len(one) == 3
    np.testing.assert_allclose(eight, one, rtol=1e-4)


def test_rows_beyond_the_first_length_of_longrope_count_as_if_alone(tmp_path):
    run_ranks(train, 1, tmp_path, tmp_path, timeout=60)
    items = long_and_short_rows().items
    lengths = [len(item["prompt_ids"] + item["completion_ids"]) for item in items]
    assert min(lengths) <= FIRST < max(lengths)
    oracle = Oracle(tiny_phi3(), beta=0.1, lr=1e-3)
    for line, expected in zip(lines(tmp_path), replay(tmp_path, long_and_short_rows(), oracle), strict=True):
        assert line["loss"] == pytest.approx(expected.loss, rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-4)
    # In file order each row is paired with the completion before it.
    partners = [items[-1], *items[:-1]]
    last = lines(tmp_path, "eval")[-1]
    assert last["loss"] == pytest.approx(oracle.step(items, partners).loss, rel=1e-5)


@pytest.mark.parametrize("packing", ["auto", "off"])
def test_every_plan_keeps_rows_up_to_the_first_length_and_longer_ones_apart(packing):
    rows = long_and_short_rows()
    loaders = [KTODataLoader(rows, 8, 8, world_size=2), KTODataLoader(rows, None, 8)]
    plan_for(loaders, Actor(tiny_phi3(), packing=packing), Actor(tiny_llama()))
    for loader in loaders:
        assert loader.layout.apart_at == (FIRST,)
        for batch in loader:
            for name, micro_batches in (("", batch.matched), ("kl_", batch.mismatched)):
                for micro_batch in micro_batches:
                    lengths = micro_batch[f"{name}attention_mask"].sum(1)
                    assert (lengths <= FIRST).all() or (lengths > FIRST).all()
        lengths = np.array([30, 5, 12, 13, 40, 7])
        for with_gradient in (True, False):
            plan = loader.plan(lengths, with_gradient=with_gradient)
            assert sorted(chain(*(share.tolist() for shares in plan for share in shares))) == list(range(6))
    loader = KTODataLoader(token_rows(LABELS, seed=5, longest=FIRST // 2), 8, 8)
    plan_for([loader], Actor(tiny_phi3()))
    assert loader.layout.apart_at == ()


def test_a_part_of_a_row_does_not_tell_how_long_the_row_is():
    loader = KTODataLoader(long_and_short_rows(), 8, 8, shared_by=2)
    with pytest.raises(ConfigError, match=r"--sequence_parallel_size: leaves each rank a part .* pass --max_len 12."):
        plan_for([loader], Actor(tiny_phi3()))


def test_rows_beyond_the_positions_of_dynamic_ntk_are_refused(caplog):
    model = tiny_llama(max_position_embeddings=FIRST, rope_parameters=DYNAMIC)
    says = r"--max_len: the model \(llama\) has dynamic rotary positions, .* up to 30 tokens. Pass --max_len 12."
    with pytest.raises(ConfigError, match=says):
        plan_for([KTODataLoader(long_and_short_rows(), 8, 8)], Actor(model))
    with pytest.raises(ConfigError, match=r"--max_len: m has dynamic rotary positions, .* Pass --max_len 12."):
        check_fits("m", model.config, 13, 5)
    with caplog.at_level(logging.WARNING):
        assert check_fits("m", model.config, FIRST, 5) is None


def test_what_positions_ask_of_rows_is_read_from_every_form_of_configuration():
    assert row_lengths(tiny_phi3().config) == RowLengths(apart_at=FIRST)
    assert row_lengths(tiny_llama().config) == RowLengths()
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    assert row_lengths(tiny_llama(rope_parameters=yarn).config) == RowLengths()
    by_layer = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = tiny_llama().config
    config.rope_parameters = by_layer
    assert row_lengths(config) == RowLengths(apart_at=FIRST)
    own_code = transformers.PretrainedConfig(
        max_position_embeddings=64, rope_scaling={"type": "dynamic", "factor": 2.0}
    )
    assert row_lengths(own_code) == RowLengths(at_most=64)
