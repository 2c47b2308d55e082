"""A prompt that runs once for several completions: models against themselves in float64, attention against a square."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from openkto.batches.micro_batch import collate
from openkto.models import Actor
from openkto.models.packed_attention import _in_one_kernel, packed_attention
from openkto.models.packing import predictors
from tests.models.architectures import CONFIGS, random_model

# What an actor takes of a micro-batch.
NAMES = ("input_ids", "attention_mask", "loss_mask", "token_index", "scored_index", "place_index", "query_bounds")
# (prompt, completion's tokens): of prompt 0 three completions, of prompt 1 two, of prompt 2 one; windows have 8 tokens.
PROMPTS, PAIRS, REUSED = (11, 3, 6), [(0, 5), (0, 9), (0, 1), (1, 4), (1, 2), (2, 2)], [0, 11, 11, 0, 3, 0]


def both_layouts():
    """Return the pairs as a micro-batch of whole rows, and as one with each prompt once."""
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 97, length).tolist() for length in PROMPTS]
    sequences = [(prompts[p], random.integers(3, 97, n).tolist(), [True] * n) for p, n in PAIRS]
    rows = [{"label": True, "weight": 1.0, "row": row} for row in range(len(PAIRS))]
    return collate(sequences, rows, 0), collate(sequences, rows, 0, np.array(REUSED))


def run(actor, batch):
    """Return the actor's output, the hidden states that predict, and their tokens' log-probabilities in float64."""
    kept = []
    hook = actor.body.register_forward_hook(lambda *call: kept.append(call[-1].last_hidden_state[0]))
    with torch.no_grad():
        output = actor(*(batch.get(name) for name in NAMES), with_tokens=True)
        hook.remove()
        places = predictors(batch["attention_mask"], batch["scored_index"], batch.get("place_index"))
        hidden_KH = kept[0][places]
        logits_KV = actor.logit_map.apply_(actor.language_model.get_output_embeddings()(hidden_KH))
    tokens_K = batch["input_ids"].flatten()[batch["scored_index"]]
    return output, len(kept[0]), logits_KV.log_softmax(-1).gather(-1, tokens_K[:, None])


def gradients(actor, batch):
    """Return the gradient of each parameter, of a sum in which every completion has another weight."""
    actor.zero_grad()
    output = actor(*(batch.get(name) for name in NAMES))
    (output.log_prob_B * torch.arange(1, 1 + len(PAIRS))).sum().backward()
    return {name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "Gemma2"])  # which caps scores, and is not packed
def test_a_shared_prompt_gives_each_completion_what_its_own_would(name):
    model = random_model(CONFIGS[name]).double()
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the other has no float64
    actor = Actor(model)
    batches = both_layouts()
    whole, once = (run(actor, batch) for batch in batches)
    assert (whole[1], once[1]) == (sum(PROMPTS[p] + n for p, n in PAIRS), sum(PROMPTS) + sum(n for _, n in PAIRS))
    torch.testing.assert_close(once[2], whole[2], rtol=0, atol=1e-10)
    torch.testing.assert_close(once[0].log_prob_B, whole[0].log_prob_B, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(once[0].log_prob_K, whole[0].log_prob_K, rtol=1e-6, atol=1e-6)
    of_whole, of_once = (gradients(actor, batch) for batch in batches)
    assert of_once.keys() == of_whole.keys() != set()
    largest = max(float(gradient.abs().max()) for gradient in of_whole.values())
    for parameter, gradient in of_whole.items():
        torch.testing.assert_close(of_once[parameter], gradient, rtol=1e-5, atol=1e-7 * largest)


def test_padded_rows_are_run_whole():
    batches, actor = both_layouts(), Actor(random_model(CONFIGS["Gemma2"]))
    with torch.no_grad():
        whole, once = (
            actor(*(b.get(n) for n in ("input_ids", "attention_mask", "loss_mask", "token_index", "scored_index")))
            for b in batches
        )
    assert torch.equal(whole.log_prob_B, once.log_prob_B)


QUERY_BOUNDS, KEY_BOUNDS = [0, 7, 9, 14], [0, 7, 12, 17]
KEYS = [*range(7), 0, 1, 2, 7, 8, *range(9, 14)]  # row 1 has the first three tokens of row 0 before its own two


def heads(number, seed, size=8):
    return torch.randn(1, number, QUERY_BOUNDS[-1], size, generator=torch.Generator().manual_seed(seed))


def of_rows(query, key, value, window):
    """Return attention with every row's tokens written out, float64: [1, A, P, D]."""
    rows = []
    for row, (start, end) in enumerate(pairwise(QUERY_BOUNDS)):
        seen = KEYS[KEY_BOUNDS[row] : KEY_BOUNDS[row + 1]]
        place = torch.arange(len(seen))[len(seen) - (end - start) :]
        distance = place[:, None] - torch.arange(len(seen))[None]
        sees = (distance >= 0) & (distance < (window or 99))
        k, v = (h[:, :, seen].double().repeat_interleave(query.shape[1] // h.shape[1], dim=1) for h in (key, value))
        scores = query[:, :, start:end].double() @ k.transpose(-1, -2) * query.shape[-1] ** -0.5
        rows.append(scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v)
    return torch.cat(rows, dim=2)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_a_completion_sees_the_prompt_of_another_row_and_its_own_tokens(window, groups):
    query, key, value = heads(4, 1), heads(4 // groups, 2), heads(4 // groups, 3)
    bounds = {"cu_seq_lens_q": torch.tensor(QUERY_BOUNDS), "cu_seq_lens_k": torch.tensor(KEY_BOUNDS)}
    more = {"sliding_window": window, "max_length_q": 7, "key_index": torch.tensor(KEYS)}
    out, _ = packed_attention(nn.Module(), query, key, value, None, **bounds, **more)
    torch.testing.assert_close(out.transpose(1, 2).double(), of_rows(query, key, value, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_the_gpu_kernel_gets_other_bounds_for_keys_than_for_queries(window, monkeypatch):
    """It runs on GPUs only; flash-attention's causal mask (from 2.1 on) ends at the last query and the last key."""
    asked = []

    def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        asked.append((cu_seq_q.tolist(), cu_seq_k.tolist(), max_q, max_k, window_size, key.shape[0]))
        return query

    monkeypatch.setattr("openkto.models.packed_attention.varlen_attn", kernel)
    query = heads(4, 1)[0].transpose(0, 1)
    bounds = torch.tensor(QUERY_BOUNDS), torch.tensor(KEY_BOUNDS)
    _in_one_kernel(query, query[KEYS], query[KEYS], bounds, 7, None, window)
    assert asked == [(QUERY_BOUNDS, KEY_BOUNDS, 7, 7, (-1 if window is None else 2, 0), 17)]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_check_before_training_finds_a_kernel_that_aligns_the_mask_otherwise(is_wrong, monkeypatch):
    def from_the_first_key(queries, keys, window, device):
        return torch.ones(queries, keys, dtype=torch.bool).tril()

    if is_wrong:
        monkeypatch.setattr("openkto.models.packed_attention._band", from_the_first_key)
    actor = Actor(random_model(CONFIGS["Llama"]))
    actor.check_forward(tolerance=1e-5)
    assert actor.packs
    assert actor.shared_differs == is_wrong
