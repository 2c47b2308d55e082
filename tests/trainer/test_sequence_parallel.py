"""Ranks that share the tokens of a micro-batch change nothing that a step computes."""

import pytest

from openkto.config import LoraConfig
from openkto.models import Actor
from tests.ranks import run_ranks
from tests.tiny import tiny_llama
from tests.trainer import test_resume as resume
from tests.trainer.test_tensor_parallel import LORA, STAGES, assert_is_definition, tiny, train

SHARED = {"tensor_parallel_size": 1, "sequence_parallel_size": 2}


@pytest.mark.parametrize("zero_stage", STAGES)
def test_two_ranks_that_share_tokens_train_as_the_definition_says(zero_stage, tmp_path):
    # The gradient is clipped to a hundredth, and Adam would hide a wrong scale of it.
    more = SHARED | {"zero_stage": zero_stage, "max_norm": 0.01}
    got = run_ranks(train, 2, tmp_path, tmp_path / "a", more)[0]
    assert_is_definition(tmp_path / "a", got, tiny_llama(), max_norm=0.01)
    assert min(line["grad_norm"] for line in got[0]) > 0.01


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_so_do_two_times_two(zero_stage, tmp_path):
    more = SHARED | {"zero_stage": zero_stage, "max_norm": 0.01, "micro": 1}
    got = run_ranks(train, 4, tmp_path, tmp_path / "a", more)[0]
    assert_is_definition(tmp_path / "a", got, tiny_llama(), max_norm=0.01)


@pytest.mark.parametrize(
    ("kind", "changes", "zero_stage"),
    [
        ("Qwen3", {"tie_word_embeddings": True}, 2),
        ("Gemma3", {"sliding_window": 4}, 3),
        ("Llama", {"num_key_value_heads": 1}, 1),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, 3),
    ],
)
def test_architectures(kind, changes, zero_stage, tmp_path):
    more = SHARED | {"kind": kind, "changes": changes, "zero_stage": zero_stage}
    got = run_ranks(train, 2, tmp_path, tmp_path / "a", more)[0]
    assert_is_definition(tmp_path / "a", got, tiny(kind, **changes))


@pytest.mark.parametrize("zero_stage", STAGES)
@pytest.mark.parametrize("ref_mode", ["adapter", "model"])
def test_an_adapter(zero_stage, ref_mode, tmp_path):
    more = SHARED | {"zero_stage": zero_stage, "lora": LORA, "ref_mode": ref_mode}
    got = run_ranks(train, 2, tmp_path, tmp_path / "a", more)[0]
    assert_is_definition(tmp_path / "a", got, Actor(tiny_llama(), lora=LORA).model, reference=tiny_llama())
