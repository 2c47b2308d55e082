"""What an adapter is on in mixture-of-experts models, and that it computes, saves and merges as plain peft has it."""

import warnings

import peft
import pytest
import safetensors.torch
import torch

from openkto.config import LoraConfig
from openkto.errors import ConfigError
from openkto.models import Actor
from openkto.models.empty import describe_adapter
from openkto.models.loading import load_model
from openkto.models.merging import merge_adapter
from openkto.report.flops import forward_work
from tests.models.zoo import tiny_model
from tests.text_rows import byte_tokenizer
from tests.tiny import tiny_llama

USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = "3 k_proj, 3 o_proj, 3 q_proj, 3 v_proj"
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IDS = torch.arange(3, 43).view(2, 20)


def moe(kind="qwen3_moe", **changes):
    """Return a model of three layers of four experts; in Qwen2-MoE and GLM the first is dense."""
    changes = {"mlp_only_layers": [0], "use_sliding_window": False} | changes if kind == "qwen2_moe" else changes
    return tiny_model(kind, **changes).float()


def actor_with(kind="qwen3_moe", names=("all-linear",), **lora):
    return Actor(moe(kind), lora=LoraConfig(lora_rank=2, target_modules=list(names), **lora))


def trained(actor):
    return {name: p for name, p in actor.model.named_parameters() if p.requires_grad}


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("names", [["all-linear"], USUAL], ids=["all-linear", "usual"])
@pytest.mark.parametrize("kind", ["qwen2_moe", "glm4_moe", "qwen3_moe", "mixtral", "gpt_oss"])
def test_all_linear_and_the_usual_names_adapt_attention_and_experts_but_no_router(kind, names, caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        actor = actor_with(kind, names)
    dense = "3 down_proj, 3 gate_proj, 3 k_proj, 3 o_proj, 3 q_proj, 3 up_proj, 3 v_proj"
    layers, count, size = (dense, 2, 18432) if kind in ("qwen2_moe", "glm4_moe") else (ATTENTION, 3, 27648)
    if kind in ("mixtral", "gpt_oss"):
        size = 55296  # 3 layers of 4 experts of 3 matrices of 32 x 48
    assert actor.describe_adapter() == (
        f"{layers}; {size} of the {size} parameters of experts ({count} mlp.experts.down_proj, {count} "
        "mlp.experts.gate_up_proj)"
    )
    # One part of the dense or shared MLPs' names is `gate_proj`; a router is `gate`, `router` or `shared_expert_gate`.
    assert not [n for n in trained(actor) if {"gate", "router", "shared_expert_gate"} & set(n.split("."))]
    assert "target_modules" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3_moe", LoraConfig(lora_rank=2)),
        ("llama", LoraConfig(lora_rank=2, use_dora=True, lora_modules_to_save=["embed_tokens"])),
    ],
)
def test_an_adapter_is_described_without_weights_as_it_will_be(kind, settings, tmp_path):
    tiny_model(kind).save_pretrained(tmp_path / "model")
    actor = Actor(str(tmp_path / "model"), lora=settings)
    train, whole = sum(p.numel() for p in trained(actor).values()), sum(p.numel() for p in actor.model.parameters())
    expected = f"{actor.describe_adapter()}; {train} parameters train, of {whole}"
    (tmp_path / "model/model.safetensors").unlink()
    assert describe_adapter(str(tmp_path / "model"), settings) == expected
    actor.export(actor.model.state_dict(), byte_tokenizer(), tmp_path / "adapter", torch.float32)
    assert describe_adapter(str(tmp_path / "adapter"), LoraConfig()) == expected


def test_no_architecture_has_its_routers_among_all_linear():
    for kind, size in (("jetmoe", 67584), ("jamba", 18432), ("lfm2_moe", 18432)):
        actor = actor_with(kind)
        assert f"{size} of the {size} parameters of experts" in actor.describe_adapter()
        assert not [name for name in trained(actor) if {"gate", "router"} & set(name.split("."))]


def test_experts_that_stay_frozen_are_said_with_the_flag_that_trains_them():
    assert actor_with("gpt_oss", ["q_proj"]).describe_adapter() == (
        "3 q_proj; experts stay frozen (3 mlp.experts.down_proj, 3 mlp.experts.gate_up_proj): --target_parameters "
        "mlp.experts.down_proj mlp.experts.gate_up_proj would train them"
    )
    # One half of a stack is no stack: what names it alone has no effect, and is said.
    some = actor_with("qwen2_moe", ["q_proj", "up_proj"]).describe_adapter()
    assert some.startswith("3 q_proj, 3 up_proj; experts stay frozen (2 mlp.experts.down_proj, 2 ")


def test_target_parameters_say_which_experts_and_no_others():
    last = actor_with("gpt_oss", target_parameters=["layers.2.mlp.experts.down_proj"])
    assert last.describe_adapter() == (
        f"{ATTENTION}; 6144 of the 55296 parameters of experts (1 mlp.experts.down_proj); experts stay frozen "
        "(2 mlp.experts.down_proj, 3 mlp.experts.gate_up_proj): --target_parameters mlp.experts.down_proj "
        "mlp.experts.gate_up_proj would train them"
    )
    assert actor_with(names=["q_proj"], target_parameters=STACKS).describe_adapter().startswith("3 q_proj; 27648 of")
    only_a_stack = actor_with(names=["gate_proj", "up_proj"]).describe_adapter()
    assert only_a_stack.startswith(
        "18432 of the 27648 parameters of experts (3 mlp.experts.gate_up_proj); experts stay"
    )
    # A router trains where its weight is named.
    assert [n for n in trained(actor_with(target_parameters=["mlp.gate.weight"])) if ".mlp.gate." in n]


def test_usual_names_that_a_model_has_not_are_said_and_others_are_refused(caplog):
    actor_with("qwen3_moe", ["q_proj", "gate_proj"])
    assert caplog.messages == [
        "warning: --target_modules: Qwen3MoeForCausalLM has no gate_proj; the adapter is on the others. There are: "
        "down_proj, embed_tokens, gate_up_proj, k_proj, lm_head, o_proj, q_proj, v_proj."
    ]
    for names in (["gate_proj"], ["q_proj", "c_attn"]):
        with pytest.raises(ConfigError, match=f"got '{names[-1]}', no module of that name. There are: embed_tokens"):
            actor_with("qwen3_moe", names)
    with pytest.raises(ConfigError, match=r"got 'mlp\.experts\.w1', none of that name\. There are: mlp"):
        actor_with(target_parameters=["mlp.experts.w1"])
    with pytest.raises(ConfigError, match=r"got 'experts', none of that name\. It has none: leave it out\."):
        Actor(tiny_llama(), lora=LoraConfig(lora_rank=2, target_parameters=["experts"]))


@pytest.mark.parametrize(("flag", "value"), [("lora_dropout", 0.1), ("use_dora", True)])
def test_what_an_adapter_on_experts_does_not_go_with_is_one_sentence(flag, value):
    with pytest.raises(ConfigError) as error:
        actor_with("qwen3_moe", **{flag: value})
    assert str(error.value) == (
        f"--{flag}: cannot go with an adapter on experts, where peft changes the weights themselves; got {value}. "
        "Leave it out, or name other modules in --target_modules, such as q_proj k_proj v_proj o_proj."
    )
    actor_with("qwen3_moe", ["q_proj", "v_proj"], **{flag: value})


@pytest.mark.parametrize("kind", ["glm4_moe", "mixtral", "gpt_oss"])
def test_an_adapter_on_experts_computes_loads_resumes_and_merges_as_peft_has_it(tmp_path, kind):
    moe(kind).save_pretrained(tmp_path / "base")
    lora = LoraConfig(lora_rank=2, target_modules=USUAL)
    actor = Actor(str(tmp_path / "base"), lora=lora, gradient_checkpointing=True)
    torch.manual_seed(1)
    for parameter in trained(actor).values():
        torch.nn.init.normal_(parameter, std=0.2)
    scored = torch.ones_like(IDS, dtype=torch.bool)
    scored[:, 0] = False
    ours_B = actor.train()(IDS, torch.ones_like(IDS), scored).log_prob_B
    ours_B.sum().backward()
    weights = {name: p.detach() for name, p in trained(actor).items()}
    assert all(p.grad is not None and bool(p.grad.any()) for p in trained(actor).values())
    actor.export(weights, byte_tokenizer(), tmp_path / "adapter", torch.float32)
    files = safetensors.torch.load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in files.values()) == sum(p.numel() for p in weights.values())

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        theirs = peft.PeftModel.from_pretrained(load_model(str(tmp_path / "base")), tmp_path / "adapter")
    apart = logits(theirs)[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None]).double().sum((1, 2)) - ours_B
    assert apart.abs().max() < 1e-3
    again = Actor(str(tmp_path / "adapter"), keeps_start=True)
    torch.testing.assert_close(logits(again.model), logits(theirs))
    assert again.describe_adapter() == actor.describe_adapter()
    for parameter in trained(again).values():
        parameter.data.mul_(0.5)
    assert (logits(again.model) - logits(theirs)).abs().max() > 0.01
    with again.reference():
        torch.testing.assert_close(logits(again.model), logits(theirs))

    with pytest.raises(ConfigError, match="--lora_dropout: cannot go with an adapter on experts, such as that of"):
        Actor(str(tmp_path / "adapter"), lora=LoraConfig(lora_dropout=0.1))
    (tmp_path / "whole").mkdir()
    merge_adapter(str(tmp_path / "adapter"), byte_tokenizer(), tmp_path / "whole", None)
    torch.testing.assert_close(logits(load_model(str(tmp_path / "whole"))), logits(theirs), rtol=0, atol=1e-4)


def test_the_experts_of_an_adapted_model_are_counted_as_before():
    work = forward_work(Actor(moe()))
    assert forward_work(actor_with(names=["all-linear"]), adapter_off=True).body == work.body
