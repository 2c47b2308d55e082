"""Answers during training: they change nothing, are transformers' own, and are written down once."""

import json

import pytest
import torch

from openkto.config import LoraConfig
from openkto.data.prompts import Prompt
from openkto.distributed.zero_options import ZeroOptions
from openkto.models.generation import Sampling
from openkto.trainer.rng import rng_state
from openkto.trainer.samples import Samples
from tests.helpers.runs import MIXED, train
from tests.ranks import run_ranks
from tests.tiny import token_rows

PROMPTS = [Prompt("eval", [1, 5, 6, 7], (8, 9, 2), True), Prompt("file", [1, 9]), Prompt("file", [1, 17, 44, 3, 21])]
NEW_TOKENS = 8


class Numbers:
    """A tokenizer whose text is the ids."""

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


def samples(**changes) -> Samples:
    return Samples(
        PROMPTS, Sampling(NEW_TOKENS, 0.7, 0.9, (2,), 0) if not changes else changes["sampling"], Numbers(), 3
    )


def answers_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def both_ways(folder, zero_stage, more):
    """Train with samples and without; return both weights, and the generators' states at the end."""
    ends = []
    for name, asked in (("with", samples()), ("without", None)):
        found = train(
            MIXED, folder / name, zero_stage, samples=asked, eval_rows=token_rows([True, False] * 3, 5), **more
        )
        ends.append((found[1] if found else None, rng_state(torch.device("cpu"))))
    return ends


WAYS = {
    "zero_0": (0, {}),
    "zero_2_lora_with_dropout": (2, {"lora": LoraConfig(lora_rank=2, lora_dropout=0.3), "ref_mode": "adapter"}),
    "zero_3": (3, {}),
    "zero_3_layer_at_a_time": (3, {"zero": ZeroOptions(param_offload=True, adam_offload=True)}),
}


@pytest.mark.parametrize(("zero_stage", "more"), WAYS.values(), ids=WAYS.keys())
def test_a_run_with_samples_has_the_very_weights_of_one_without(tmp_path, zero_stage, more):
    ranks = run_ranks(both_ways, 2, tmp_path, tmp_path, zero_stage, more)
    (weights, _), (plain_weights, _) = ranks[0]
    assert weights.keys() == plain_weights.keys()
    assert all(torch.equal(weights[name], plain_weights[name]) for name in weights)
    for (_, state), (_, plain_state) in ranks:
        assert all((state[name] == plain_state[name]).all() for name in state)
    lines = answers_of(tmp_path / "with")
    assert [(line["step"], line["sample"]) for line in lines] == [(s, i) for s in (0, 3, 5) for i in range(3)]
    assert not (tmp_path / "without" / "samples.jsonl").exists()
