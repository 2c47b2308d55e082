"""Each row of a micro-batch counts as if it ran alone through the model as it was loaded, or the model is refused."""

import warnings

import numpy as np
import pytest
import torch

from openkto.batches.plan import plan_micro_batches
from openkto.errors import ConfigError
from openkto.models import Actor
from openkto.models.empty import has_experts
from openkto.models.positions import row_lengths
from tests.models.zoo import IN_FLOAT32, KINDS, VOCABULARY, tiny_config, tiny_model

LENGTHS = [5, 13, 30, 21]  # beyond a window of 8, and on both sides of a first length of 16
PROMPT = 2
WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 1.5], dtype=torch.float64)
PHI3 = {
    "head_dim": 8,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.7],
        "long_factor": [1.5, 2.5, 5.0, 9.0], "original_max_position_embeddings": 16,
    },
}  # fmt: skip
# (type, changes of its configuration, whether rows are packed where they may be)
RIGHT = [
    ("falcon_h1", {"lm_head_multiplier": 0.3}, False),
    ("gemma4_text", {"use_bidirectional_attention": "vision"}, True),
    ("gpt_oss", {}, False),
    ("granite_swa", {}, False),
    ("hyperclovax", {"logits_scaling": 0.2}, True),
    ("llama4_text", {}, False),
    ("mimo_v2_flash", {}, False),
    ("minicpm3", {}, True),
    ("mpt", {"logit_scale": "inv_sqrt_d_model"}, False),
    ("phi3", PHI3, True),
    ("phimoe", {"router_jitter_noise": 0.3, "input_jitter_noise": 0.2, "sliding_window": 8}, False),
    ("qwen2_moe", {}, False),
    ("recurrent_gemma", {"logits_soft_cap": 2.0}, False),
    ("xlstm", {"output_logit_soft_cap": 2.0}, False),
]
REFUSED = [
    ("bert", {"is_decoder": True}, "the log-probabilities must follow from the model's own logits"),
    ("cpmant", {}, "each token must be predicted from those before it"),
    ("dory", {}, "the model must have a body and a linear head"),
    ("electra", {}, "each token must be predicted from those before it"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "each token must see only what came before it"),
    ("rembert", {"is_decoder": True}, "the log-probabilities must follow from the model's own logits"),
    ("xlnet", {}, "each token must be predicted from those before it"),
]


def rows():
    ids = torch.randint(3, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    places = torch.arange(max(LENGTHS))
    real = places < torch.tensor(LENGTHS)[:, None]
    return ids, real.long(), real & (places >= PROMPT)


def each_alone(model):
    """Return each row's log-probability and the gradient of their weighted sum, from the model's own logits."""
    log_probs = []
    for ids, length in zip(rows()[0], LENGTHS, strict=True):
        logits = model.eval()(input_ids=ids[None, :length], use_cache=False).logits[0, PROMPT - 1 : -1]
        tokens = logits.double().log_softmax(-1).gather(-1, ids[PROMPT:length, None])
        log_probs.append(tokens.sum())
    log_prob = torch.stack(log_probs)
    (log_prob * WEIGHTS).sum().backward()
    return log_prob.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def in_micro_batches(actor):
    """Return the same as the trainer runs the rows."""
    ids, attention, mask = rows()
    apart_at = row_lengths(actor.model.config).apart_at
    limits = () if apart_at is None else (apart_at,)
    log_prob = torch.zeros(len(LENGTHS), dtype=torch.float64)
    for (share,) in plan_micro_batches(np.array(LENGTHS), 1, packed=actor.packs, apart_at=limits):
        longest = max(LENGTHS[i] for i in share)
        own = [tensor[share][:, :longest] for tensor in (ids, attention, mask)]
        found = actor(*own).log_prob_B
        (found * WEIGHTS[share]).sum().backward()
        log_prob[share] = found.detach()
    return log_prob, {name: p.grad for name, p in actor.model.named_parameters() if p.grad is not None}


def compare(kind, packing, **changes):
    """Compare the two, and return whether rows were packed.

    Raises:
        ConfigError: the model is refused.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log_prob, gradients = each_alone(tiny_model(kind, **changes))
        actor = Actor(tiny_model(kind, **changes), packing=packing)
        actor.check_forward(1e-4)
        own_log_prob, own_gradients = in_micro_batches(actor.train())
    allowed = 1e-3 if kind in IN_FLOAT32 else 1e-4
    torch.testing.assert_close(own_log_prob, log_prob, rtol=0, atol=allowed)
    assert own_gradients.keys() == gradients.keys()
    size = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    apart = sum(float((own_gradients[n] - g).double().square().sum()) for n, g in gradients.items()) ** 0.5
    assert apart < allowed * size
    return actor.packs


# A model whose rows are not packed runs alike either way.
@pytest.mark.parametrize(
    ("kind", "changes", "packs", "packing"),
    [
        pytest.param(*case, packing, marks=[] if case[-1] or packing == "auto" else pytest.mark.slow)
        for case in RIGHT
        for packing in ("auto", "off")
    ],
    ids=[f"{kind}-{packing}" for kind, _, _ in RIGHT for packing in ("auto", "off")],
)
def test_models_with_ways_of_their_own_are_right(kind, changes, packs, packing):
    assert compare(kind, packing, **changes) == (packs and packing == "auto")


@pytest.mark.parametrize(("kind", "changes", "says"), REFUSED, ids=[kind for kind, _, _ in REFUSED])
def test_models_that_are_not_causal_or_not_known_are_refused(kind, changes, says):
    with pytest.raises(ConfigError, match=says):
        compare(kind, "auto", **changes)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["auto", "off"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_right_or_refused_in_a_sentence(kind, packing):
    try:
        compare(kind, packing)
    except ConfigError as error:
        pytest.skip(f"refused: {error}")


# The last one's linear attention takes a minute on a CPU.
@pytest.mark.parametrize("kind", ["hunyuan_v1_moe", "glm4_moe", pytest.param("kimi_linear", marks=pytest.mark.slow)])
def test_experts_under_other_names_have_a_balancing_loss(kind):
    assert has_experts(tiny_config(kind))
    actor = Actor(tiny_model(kind).float())
    assert (actor.num_experts, actor.experts_per_token) == (4, 2)
    actor.check_forward(1e-3, with_balancing_loss=True)
    ids, attention, mask = rows()
    actor.train()(ids, attention, mask, with_balancing_loss=True).balancing_loss.backward()
    routers = [p.grad for name, p in actor.model.named_parameters() if name.endswith(("gate.weight", "gate.wg.weight"))]
    assert routers
    assert all(gradient.abs().max() > 1e-6 for gradient in routers)
    actor.num_experts = 5  # as where a model gives the logits of some experts only
    with pytest.raises(ConfigError, match=r"--aux_loss_coef: needs a model that gives its routers' logits, of all"):
        actor.check_forward(1e-3, with_balancing_loss=True)
