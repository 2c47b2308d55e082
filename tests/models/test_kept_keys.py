"""Completions that run after prompts of another forward: models against themselves in float64, and their gradients."""

import numpy as np
import pytest
import torch

from openkto.batches.micro_batch import REST, after_prompts, collate
from openkto.config import LoraConfig
from openkto.models import Actor
from openkto.models.kept_keys import KeptKeys
from openkto.models.packing import predictors
from openkto.trainer.forwards import model_inputs
from tests.models.architectures import CONFIGS, random_model
from tests.tiny import tiny_llama

# Tokens of a prompt, of its own completion and of another one; windows have 8. The last pair's prompt is not reused.
ROWS, REUSED = [(11, 5, 9), (3, 4, 1), (1, 6, 2), (6, 2, 12), (9, 3, 3)], [10, 2, 0, 5, 0]


def rows_and_pairs(vocabulary=97):
    """Return rows as a micro-batch, and their prompts with other completions as one that can go on after it."""
    random = np.random.default_rng(0)
    found = [tuple(random.integers(3, min(vocabulary, 61), n).tolist() for n in sizes) for sizes in ROWS]
    rows = [{"label": True, "weight": 1.0, "row": row} for row in range(len(ROWS))]
    matched = collate([(prompt, own, [True] * len(own)) for prompt, own, _ in found], rows, 0)
    pairs = collate([(prompt, other, [True] * len(other)) for prompt, _, other in found], rows, 0)
    return matched, pairs | after_prompts(pairs, matched, np.array(REUSED))


def rest_of(pairs):
    return pairs | {name: pairs[own] for name, own in REST.items()}


def log_probs(actor, batch, **more):
    """Return a forward's output, its tokens, and the scored ones' log-probabilities in the model's own precision."""
    hidden = []
    hook = actor.body.register_forward_hook(lambda *call: hidden.append(call[-1].last_hidden_state[0]))
    output = actor(*model_inputs(batch), **more)
    hook.remove()
    places_K = predictors(batch["attention_mask"], batch["scored_index"], batch.get("place_index"))
    logits_KV = actor.logit_map.apply_(actor.language_model.get_output_embeddings()(hidden[0][places_K]))
    tokens_K1 = batch["input_ids"].flatten()[batch["scored_index"]][:, None]
    return output, len(hidden[0]), logits_KV.log_softmax(-1).gather(-1, tokens_K1)


QUICK = {"Llama", "Mistral", "Mixtral"}


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    # Gemma 2 caps scores, and is not packed.
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in CONFIGS if n != "Gemma2"],
)
def test_a_completion_after_a_prompt_of_another_forward_gives_what_the_whole_row_would(name):
    model = random_model(CONFIGS[name]).double()
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the other has no float64
    actor, kept = Actor(model), KeptKeys()
    matched, pairs = rows_and_pairs()
    before, after = log_probs(actor, matched), log_probs(actor, matched, kept_keys=kept)
    assert torch.equal(before[2], after[2])
    whole = log_probs(actor, pairs)
    kept.start_taking()
    rest = log_probs(actor, rest_of(pairs), kept_keys=kept)
    kept.close()
    tokens = sum(prompt + other for prompt, _, other in ROWS)
    assert (whole[1], rest[1]) == (tokens, tokens - sum(REUSED))
    torch.testing.assert_close(rest[2], whole[2], rtol=0, atol=1e-10)
    torch.testing.assert_close(rest[0].log_prob_B, whole[0].log_prob_B, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(lora_rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize(
    "checkpointing",
    [
        {},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "use_reentrant": True},
        {"gradient_checkpointing": "selective"},
    ],
    ids=["none", "whole", "reentrant", "selective"],
)
def test_a_forward_between_changes_no_gradient_and_recomputed_layers_keep_nothing(checkpointing, lora):
    matched, pairs = rows_and_pairs()

    def gradients(kept):
        actor = Actor(tiny_llama(), lora=lora, **checkpointing).train()
        output = actor(*model_inputs(matched), kept_keys=kept)
        if kept is not None:
            kept.start_taking()
            with torch.no_grad():
                actor.eval()(*model_inputs(rest_of(pairs)), kept_keys=kept)
            kept.close()
            actor.train()
        output.log_prob_B.sum().backward()
        return {name: p.grad for name, p in actor.named_parameters() if p.grad is not None}

    kept = KeptKeys()
    alone, together = gradients(None), gradients(kept)
    assert not kept.layers
    assert alone.keys() == together.keys() != set()
    assert all(torch.equal(gradient, together[name]) for name, gradient in alone.items())


def test_only_equal_prompts_are_reused():
    matched, pairs = rows_and_pairs()
    pairs["input_ids"][0, 9] += 1
    with pytest.raises(AssertionError, match="only equal prompts are reused"):
        after_prompts(pairs, matched, np.array(REUSED))


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_check_before_training_finds_completions_that_do_not_see_their_prompt(is_wrong, monkeypatch):
    right = KeptKeys.attend_to

    def in_another_order(self, key, value):
        keys, values = right(self, key, value)
        return (keys.flip(0), values) if self.phase == "taking" else (keys, values)

    if is_wrong:
        monkeypatch.setattr(KeptKeys, "attend_to", in_another_order)
    actor = Actor(random_model(CONFIGS["Llama"]))
    actor.check_forward(tolerance=1e-5)
    assert actor.packs
    assert actor.shared_differs == is_wrong
