"""Packed rows against padded ones: attention against a block-diagonal one in float64, models against themselves."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from openkto.errors import ConfigError
from openkto.models import Actor
from openkto.models.packed_attention import _in_one_kernel, packed_attention
from openkto.models.packing import layer_kinds, pack
from tests.models.architectures import CONFIGS, MOE, SIZES, random_model, right_padded_batch

BOUNDS = [0, 7, 8, 20, 33]


def block_diagonal_attention(query, key, value, bounds, *, scale=None, window=None):
    """Causal attention over the whole square, where a token sees its own row alone; [1, A, P, D] each."""
    row = torch.bucketize(torch.arange(bounds[-1]), torch.tensor(bounds[1:]), right=True)
    distance = torch.arange(bounds[-1])[:, None] - torch.arange(bounds[-1])[None]
    sees = (row[:, None] == row[None]) & (distance >= 0) & (distance < (window or math.inf))
    key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1) for heads in (key, value))
    scores = query @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
    return scores.masked_fill(~sees, -math.inf).softmax(-1) @ value


def heads(number, seed, size=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, number, BOUNDS[-1], size, generator=generator).requires_grad_()


def check_attention(attention, window, groups, scale, size=8, value_size=8):
    query, key, value = heads(4, 1, size), heads(4 // groups, 2, size), heads(4 // groups, 3, value_size)
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    expected = block_diagonal_attention(*exact, BOUNDS, scale=scale, window=window)
    out, _ = attention(query, key, value)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    (expected * weights).sum().backward()
    (out.transpose(1, 2).double() * weights).sum().backward()
    torch.testing.assert_close(out.transpose(1, 2).double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip((query, key, value), exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_packed_attention_is_block_diagonal(window, groups, scale):
    def attention(query, key, value):
        bounds = torch.tensor(BOUNDS, dtype=torch.int32)
        more = {"scaling": scale, "sliding_window": window, "cu_seq_lens_q": bounds, "max_length_q": 13}
        return packed_attention(nn.Module(), query, key, value, None, **more)

    check_attention(attention, window, groups, scale)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("groups_heads", [True, False])
@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (12, 8), (4, 9)])
def test_the_gpu_kernel_is_asked_for_the_same(window, groups, groups_heads, size, value_size, monkeypatch):
    """It runs on GPUs alone: what stands in for it follows its documentation (torch 2.11 knows no `enable_gqa`)."""

    def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        assert (max_q, max_k, window_size[1]) == (13, 13, 0)
        assert cu_seq_q.tolist() == cu_seq_k.tolist() == BOUNDS
        assert enable_gqa == (groups > 1 and groups_heads)
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] == -(-max(size, value_size) // 8) * 8
        lines = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
        seen = None if window_size[0] == -1 else window_size[0] + 1
        return block_diagonal_attention(*lines, BOUNDS, scale=scale, window=seen)[0].transpose(0, 1)

    monkeypatch.setattr("openkto.models.packed_attention.varlen_attn", kernel)
    monkeypatch.setattr("openkto.models.packed_attention.GROUPS_HEADS", groups_heads)

    def attention(query, key, value):
        lines = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        bounds = torch.tensor(BOUNDS, dtype=torch.int32)
        return _in_one_kernel(*lines, (bounds, bounds), 13, None, window)[None], None

    check_attention(attention, window, groups, None, size, value_size)


def test_the_next_token_of_a_cache_is_refused():
    with pytest.raises(ValueError, match=r"runs whole rows; got 1 tokens that look at 5, as in generation. Call set_"):
        packed_attention(nn.Module(), torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8), None)


def test_without_bounds_each_line_is_a_row():
    query = torch.randn(3, 4, 6, 8, generator=torch.Generator().manual_seed(1))
    out, _ = packed_attention(nn.Module(), query, query, query, None)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_capped_scores_are_refused():
    query = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ValueError, match="knows neither soft caps nor attention sinks"):
        packed_attention(nn.Module(), query, query, query, None, softcap=3.0)


def test_positions_begin_again_in_each_row():
    ids, attention, _ = right_padded_batch()
    packed = pack(ids, attention, attention.flatten().nonzero()[:, 0])
    assert packed.position_ids.tolist() == [[*range(20), *range(13), *range(6)]]
    assert packed.input_ids.tolist() == [ids[0].tolist() + ids[1, :13].tolist() + ids[2, :6].tolist()]
    assert packed.bounds.tolist() == [0, 20, 33, 39]
    assert packed.longest == 20


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3", "Mixtral"])
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_packed_equals_padded_and_no_row_sees_another(name, use_reentrant):
    ids, attention, mask = right_padded_batch()
    checkpointing = {"gradient_checkpointing": use_reentrant is not None, "use_reentrant": use_reentrant is True}
    padded = Actor(random_model(CONFIGS[name]), packing="off")
    packed = Actor(random_model(CONFIGS[name]), packing="on", **checkpointing)
    weights = torch.tensor([1.0, -2.0, 0.5])
    results = []
    for actor in (padded, packed):
        output = actor.train()(ids, attention, mask, with_entropy=True)
        (output.log_prob_B * weights).sum().backward()
        results.append((output, {n: p.grad for n, p in actor.named_parameters()}))
    (a, gradients), (b, others) = results
    torch.testing.assert_close(b.log_prob_B, a.log_prob_B, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(b.entropy_B, a.entropy_B, rtol=1e-5, atol=1e-5)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(others[parameter], gradient, rtol=1e-5, atol=1e-5, msg=parameter)
    # Another first row leaves the others as they were, to the last bit, and a row alone is what it was among others.
    other_ids = ids.clone()
    other_ids[0] = 5
    with torch.no_grad():
        changed = packed(other_ids, attention, mask).log_prob_B
        alone = packed(ids[1:2], attention[1:2], mask[1:2]).log_prob_B
    assert changed[0] != b.log_prob_B[0]
    torch.testing.assert_close(changed[1:], b.log_prob_B[1:].detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(alone[0], b.log_prob_B[1].detach(), rtol=1e-6, atol=1e-6)


def test_the_balancing_loss_counts_real_tokens_alone():
    ids, attention, mask = right_padded_batch()
    losses = [
        Actor(random_model(CONFIGS["Mixtral"]), packing=choice)(ids, attention, mask, with_balancing_loss=True)
        for choice in ("off", "on")
    ]
    torch.testing.assert_close(losses[0].balancing_loss, losses[1].balancing_loss)


@pytest.mark.parametrize(
    ("config", "attn_implementation", "got"),
    [
        (CONFIGS["Llama"], "sdpa", "--attn_implementation sdpa"),
        (
            transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4),
            "auto",
            "BloomForCausalLM, whose attention takes no other implementation",
        ),
        (
            transformers.NemotronConfig(**SIZES, head_dim=8),
            "auto",
            "NemotronForCausalLM, whose layers do not hand on where rows begin",
        ),
        (
            transformers.RecurrentGemmaConfig(
                vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, lru_width=32,
                attention_window_size=8, intermediate_size=96,
            ),
            "auto",
            "RecurrentGemmaForCausalLM with layers of (linear_attention|attention, recurrent)",
        ),
        (
            CONFIGS["Gemma2"],
            "auto",
            "Gemma2ForCausalLM, whose scores are capped or have sinks, without flash-attention",
        ),
        (
            transformers.Qwen3NextConfig(
                **SIZES, head_dim=8, layer_types=["linear_attention", "full_attention"], num_experts=2,
                moe_intermediate_size=8, shared_expert_intermediate_size=8, linear_num_value_heads=2,
                linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
            ),
            "auto",
            "Qwen3NextForCausalLM with layers of linear_attention",
        ),
    ],
)  # fmt: skip
def test_what_cannot_pack_is_refused_or_padded(config, attn_implementation, got):
    with pytest.raises(ConfigError, match=f"--packing: on needs attention .* got {got}. Take auto."):
        Actor(random_model(config), packing="on", attn_implementation=attn_implementation)
    assert not Actor(random_model(config), packing="auto", attn_implementation=attn_implementation).packs


def test_kinds_of_layers_are_read_under_their_other_name_too():
    """RecurrentGemma's name before transformers 5.23, which Python 3.10 does not get."""
    assert layer_kinds(SimpleNamespace(layers_block_type=["recurrent", "attention"])) == ["recurrent", "attention"]
    assert layer_kinds(SimpleNamespace(layer_types=None, layers_block_type=["mamba"])) == ["mamba"]
    assert layer_kinds(CONFIGS["Llama"]) == []


class Leaky(transformers.LlamaForCausalLM):
    """Drops the rows' bounds on the way to its attention, as a model with code of its own might."""

    def __init__(self, config):
        super().__init__(config)
        own = self.model.forward
        self.model.forward = lambda input_ids, position_ids=None, **_: own(
            input_ids, position_ids=position_ids, use_cache=False
        )


def test_a_model_that_mixes_packed_rows_is_found_out(caplog):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS["Llama"])
    config._attn_implementation = "sdpa"
    actor = Actor(Leaky(config), packing="auto")
    assert actor.packs
    actor.check_forward(1e-5)
    assert not actor.packs
    assert actor.model.config._attn_implementation == "sdpa"
    assert "Leaky does not keep packed rows apart; they are padded." in caplog.text
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match="please report it, and pass --packing auto"):
        Actor(Leaky(copy.deepcopy(CONFIGS["Llama"])), packing="on").check_forward(1e-5)


@pytest.mark.parametrize(
    "config",
    [
        transformers.PhimoeConfig(**MOE, num_local_experts=4, sliding_window=16),
        transformers.Qwen2MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
            use_sliding_window=True, sliding_window=4096, max_window_layers=2,
        ),
    ],
    ids=["Phi-MoE", "Qwen2-MoE"],
)  # fmt: skip
def test_a_window_that_only_the_mask_knows_is_found_out(config, caplog):
    window = config.sliding_window
    actor = Actor(random_model(config), packing="auto")
    assert actor.packs
    actor.check_forward(1e-4)
    assert not actor.packs
    assert "does not keep packed rows apart; they are padded." in caplog.text
    assert actor.model.config.sliding_window == window
    with pytest.raises(ConfigError, match="please report it, and pass --packing auto"):
        Actor(random_model(config), packing="on").check_forward(1e-4)
