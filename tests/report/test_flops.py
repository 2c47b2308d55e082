"""The useful work of a step, against torch's own count of what a forward and a backward multiply."""

import math

import pytest
import torch
import transformers

from benchmarks.counting import counter
from openkto.batches.loader import KTODataLoader, Layout
from openkto.config import LoraConfig
from openkto.models import Actor
from openkto.models.experts import expert_counts
from openkto.report.flops import ForwardWork, StepWork, attended_pairs, forward_work, step_work
from tests.models.zoo import KINDS, tiny_config, tiny_model
from tests.tiny import VOCABULARY, tiny_llama, token_rows

LENGTH, SCORED = 12, 7


def counted(actor: Actor, *, backward: bool) -> tuple[float, float, float]:
    """Return torch's count for two rows of one length: linear layers with the head, attention, the head alone."""
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    scored = torch.zeros_like(ids, dtype=torch.bool)
    scored[:, LENGTH - SCORED :] = True
    with counter() as count:
        log_prob = actor(ids, torch.ones_like(ids), scored).log_prob_B
        if backward:
            log_prob.sum().backward()
    counts = count.get_flop_counts()["Global"]
    attention = sum(n for op, n in counts.items() if "bmm" in str(op) and "addbmm" not in str(op))
    return sum(counts.values()) - attention, attention, 2 * 2 * SCORED * actor.model.config.vocab_size * 32


def eager(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    model.set_attn_implementation("eager")  # whose products torch counts as such, the whole square of them
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_a_full_models_work_is_what_torch_counts(tied):
    actor = Actor(eager(tiny_llama(tie_word_embeddings=tied)), packing="off")
    work, lengths = forward_work(actor), torch.tensor([LENGTH, LENGTH])
    square = (LENGTH + 1) / (2 * LENGTH)  # what a causal model needs of attention's square
    with torch.no_grad():
        linear, attention, _ = counted(actor, backward=False)
    assert work.forward(lengths, 2 * SCORED) == linear + attention * square
    linear, attention, head = counted(actor, backward=True)
    # The backward pass runs the head once more instead of keeping its logits: computed, not useful.
    assert work.training(lengths, 2 * SCORED) == linear - head + attention * square


def test_frozen_weights_cost_no_gradient_of_their_own():
    model = eager(tiny_llama())
    actor = Actor(model, packing="off", lora=LoraConfig(lora_rank=4))
    model.enable_input_require_grads()  # else the first layer needs no gradient of its input
    linear, attention, head = counted(actor, backward=True)
    work = forward_work(actor).training(torch.tensor([LENGTH, LENGTH]), 2 * SCORED)
    assert work == linear - head + attention * (LENGTH + 1) / (2 * LENGTH)
    off = forward_work(actor, adapter_off=True)
    assert off.body == forward_work(Actor(tiny_llama())).body
    assert off.trainable_body == off.trainable_head == 0


def test_a_token_meets_some_experts_and_the_window_alone():
    settings = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
    )  # fmt: skip
    actor = Actor(transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings)))
    work = forward_work(actor)
    # Two layers: queries and outputs, keys and values of half as many heads, the router, two of four experts.
    assert work.body == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 4 * 32 + 2 * 3 * 32 * 48)
    assert work.attention == ((5, 2 * 32),)


# Of the types with experts: those without other products that torch counts as attention's.
PLAIN_ATTENTION = ("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "hunyuan_v1_moe", "mixtral", "sarvam_mla")
# Llama 4 multiplies every expert with every token and throws most of it away: not useful.
DENSE_EXPERTS = {"llama4_text"}
ROOM = {"inkling_text": 0.02}  # it goes through one small layer once for each head


def counted_work(kind: str) -> tuple[float, float]:
    """Return our count over torch's for a forward of a type: linear layers with the head, and attention."""
    wide = {"sliding_window": 4096} if "sliding_window" in tiny_config(kind).to_dict() else {}
    actor = Actor(eager(tiny_model(kind, **wide).float()), packing="off")
    assert actor.num_experts == 4
    with torch.no_grad():
        linear, attention, _ = counted(actor, backward=False)
    # Linear layers in groups, which torch counts as it does attention's products.
    grouped = [m.weight.numel() for m in actor.model.modules() if type(m).__name__.endswith("GroupedLinear")]
    linear, attention = linear + 2 * 2 * LENGTH * sum(grouped), attention - 2 * 2 * LENGTH * sum(grouped)
    work, lengths = forward_work(actor), torch.tensor([LENGTH, LENGTH])
    whole = work.forward(torch.tensor([LENGTH, LENGTH]), 2 * SCORED)
    of_attention = work._attention(lengths)
    return (whole - of_attention) / linear, of_attention / (attention * (LENGTH + 1) / (2 * LENGTH) or math.nan)


@pytest.mark.parametrize("kind", PLAIN_ATTENTION)
def test_experts_and_latent_attention_are_what_torch_counts(kind):
    assert counted_work(kind) == pytest.approx((1.0, 1.0), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in DENSE_EXPERTS])
def test_the_experts_of_every_type_are_what_torch_counts(kind):
    if expert_counts(tiny_model(kind))[0] == 0:
        pytest.skip("a dense model")
    linear, _ = counted_work(kind)
    assert linear == pytest.approx(1.0, rel=ROOM.get(kind, 0.01))


def test_pairs_of_a_causal_model_by_hand():
    # Lengths 3 and 6: 1 + 2 + 3 and 1 + ... + 6; at most 4 back and forth: 1 + 2 + 3 + 4 + 4 + 4.
    assert attended_pairs(torch.tensor([3, 6]), None) == 6 + 21
    assert attended_pairs(torch.tensor([3, 6]), 4) == 6 + 18


def test_a_prompt_that_runs_in_another_row_is_not_counted_again():
    work = ForwardWork(body=1, head=10, trainable_body=0, trainable_head=0, attention=((None, 1), (2, 1)))
    # Tokens 5 and 1; the last one of four sees 4, in a window 2. Of the first row: 1 + ... + 5, and 1 + 2 + 2 + 2 + 2.
    assert work.forward(torch.tensor([5, 4]), 3, torch.tensor([0, 3])) == 2 * (5 + 1 + 30) + 4 * (15 + 4) + 4 * (9 + 2)


def test_a_step_counts_what_runs_where_prompts_are_shared():
    rows = token_rows([True, False] * 3, answers=2)
    loader = KTODataLoader(rows, 6, 6)
    loader.layout = Layout(packed=True, shares_prompts=True, shares_pairs=True)
    batch = next(iter(loader))
    unit = ForwardWork(body=1, head=0, trainable_body=1, trainable_head=0, attention=())
    completions, prompts = int(rows.completion_lengths.sum()), int(rows.prompt_lengths[::2].sum())
    trained, policy = 3 * (2 * prompts + completions), prompts + completions
    assert StepWork(unit, unit).of(batch) == 2 * (trained + policy + prompts + 2 * completions)


def test_a_step_counts_the_forwards_that_it_needs():
    rows = token_rows([True, False, True, False, True])
    batch = next(iter(KTODataLoader(rows, 5, 2)))
    unit = ForwardWork(body=1, head=0, trainable_body=1, trainable_head=0, attention=())
    matched = int((rows.prompt_lengths + rows.completion_lengths).sum())
    mismatched = matched  # the same prompts and completions, paired otherwise
    assert StepWork(unit, None).of(batch) == 2 * (3 * matched + mismatched)
    assert StepWork(unit, unit).of(batch) == 2 * (4 * matched + 2 * mismatched)


def test_a_cache_costs_no_forward_and_an_adapter_is_its_own_reference():
    actor = Actor(tiny_llama(), lora=LoraConfig(lora_rank=4))
    assert step_work(actor, object()).reference is None
    assert step_work(actor, None).reference == forward_work(actor, adapter_off=True)
    assert step_work(actor, Actor(tiny_llama())).reference == forward_work(Actor(tiny_llama()))


def test_attention_weighs_as_much_as_the_rest_at_a_length_of_its_own():
    work = ForwardWork(body=6400.0, head=0.0, trainable_body=0.0, trainable_head=0.0, attention=((None, 64),))
    assert work.attention_length == 100
    assert work.forward(torch.tensor([1000]), 0) / work.forward(torch.tensor([100]), 0) == pytest.approx(55, rel=0.01)
    windows_alone = ForwardWork(6400.0, 0.0, 0.0, 0.0, ((8, 64),))
    assert windows_alone.attention_length == float("inf")


def test_older_configurations_have_their_heads_under_other_names():
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2)
    actor = Actor(transformers.GPT2LMHeadModel(config))
    assert forward_work(actor).attention == ((None, 3 * 32),)


def test_a_model_without_attention_has_no_work_in_it():
    config = transformers.MambaConfig(vocab_size=97, hidden_size=32, state_size=4, num_hidden_layers=1)
    work = forward_work(Actor(transformers.MambaForCausalLM(config)))
    assert (work.attention, work.attention_length) == ((), math.inf)
