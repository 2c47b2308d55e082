"""The actor's log-probabilities equal those of each architecture's own logits."""

import pytest
import torch

from openkto.models import Actor
from tests.models.architectures import CONFIGS, random_model, right_padded_batch

PADDED = {"Gemma2"}  # it caps its attention's scores


def own_log_probs(model, ids, attention, mask):
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits.float()
    tokens = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (tokens * mask[:, 1:]).sum(-1)


@pytest.mark.parametrize("packing", ["auto", "off"])
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_and_gradients_equal_those_of_the_models_own_logits(name, packing, monkeypatch):
    monkeypatch.setitem(__import__("openkto.models.log_probs", fromlist=["x"]).CHUNK_ELEMENTS, "cpu", 97 * 5)
    model = random_model(CONFIGS[name]).eval()
    ids, attention, mask = right_padded_batch()
    weights = torch.tensor([1.0, -2.0, 0.5])

    expected = own_log_probs(model, ids, attention, mask)
    (expected * weights).sum().backward()
    expected_gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    actor = Actor(model, packing=packing)
    actor.train()  # every dropout above is 0.3: an actor has none in any mode
    actor.check_forward(tolerance=1e-5)
    assert actor.packs == (packing == "auto" and name not in PADDED)
    log_prob = actor(ids, attention, mask).log_prob_B
    (log_prob * weights).sum().backward()

    assert log_prob.dtype == torch.float64
    torch.testing.assert_close(log_prob.float(), expected, rtol=1e-5, atol=1e-5)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected_gradients.keys()
    for n, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[n], rtol=1e-4, atol=1e-4, msg=n)
