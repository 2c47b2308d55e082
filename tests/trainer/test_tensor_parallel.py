"""Ranks that share a model's weights change nothing that a step computes, a checkpoint keeps or an export holds."""

import json

import pytest
import torch
import transformers

from openkto.config import LoraConfig
from openkto.distributed.gather import gather_weights
from openkto.models import Actor
from tests.ranks import run_ranks
from tests.tiny import Oracle, make_trainer, quiet_args, tiny_llama, token_rows
from tests.trainer import test_resume as resume

LABELS = [True, False, True, True, False, False, True, False, True, False, False]
LR, BETA, WEIGHTS, STEPS = 3e-4, 0.3, (1.3, 0.7), 3
LORA = LoraConfig(lora_rank=4, lora_alpha=8)
STAGES = [0, 1, 2, 3]


def tiny(kind, **changes):
    """Return a random float32 model of two layers, hidden 32, with 4 heads and 2 key-value heads."""
    torch.manual_seed(0)
    settings = dict(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config(**(settings | changes))).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # else the gradients of norms that are 1, or 0, would be all alike
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def train(folder, more=None):
    """Train; return (metrics lines, what trained) on rank 0, None elsewhere."""
    settings = {"lr": LR, "beta": BETA, "micro": 2, "tensor_parallel_size": 2} | (more or {})
    settings |= {"desirable_weight": WEIGHTS[0], "undesirable_weight": WEIGHTS[1]}
    kind, changes = settings.pop("kind", None), settings.pop("changes", {})
    if kind is not None:
        settings["model"] = lambda: tiny(kind, **changes)
    trainer, strategy = make_trainer(token_rows(LABELS, 3), batch=4, steps=STEPS, **settings)
    trainer.fit(quiet_args(folder, STEPS, log_batches=True, log_entropy=True))
    weights = gather_weights(trainer.model.module.model, torch.float32, trainable_alone="lora" in settings)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return ([line for line in lines if line["kind"] == "train"], weights) if strategy.rank == 0 else None


def assert_is_definition(folder, got, model, reference=None, max_norm=1.0):
    """Compare a run with every step in float64 on one rank, as the definition says it."""
    lines, weights = got
    items = {item["row"]: item for item in token_rows(LABELS, 3).items}
    oracle = Oracle(model, beta=BETA, weights=WEIGHTS, lr=LR, max_norm=max_norm, reference=reference)
    for line, text in zip(lines, (folder / "batches.jsonl").read_text().splitlines(), strict=True):
        batch = json.loads(text)
        step = oracle.step([items[r] for r in batch["rows"]], [items[r] for r in batch["kl_rows"]])
        assert line["loss"] == pytest.approx(step.loss, rel=1e-5)
        assert line["kl"] == pytest.approx(step.z_ref, rel=1e-4, abs=1e-5)
        assert line["grad_norm"] == pytest.approx(step.grad_norm, rel=1e-4)
        assert line["num_tokens"] == sum(
            len(items[r]["prompt_ids"] + items[r]["completion_ids"])
            for b in map(json.loads, (folder / "batches.jsonl").read_text().splitlines())
            if b["step"] <= batch["step"]
            for r in b["rows"]
        )
    trained = {name: p for name, p in oracle.policy.named_parameters(remove_duplicate=False) if p.requires_grad}
    assert trained.keys() <= weights.keys()
    for name, value in trained.items():
        torch.testing.assert_close(
            weights[name].double(), value.detach(), rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("zero_stage", STAGES)
def test_two_ranks_that_share_the_weights_train_as_the_definition_says(zero_stage, tmp_path):
    # The gradient is clipped to a hundredth, and Adam would hide a wrong scale of it.
    more = {"zero_stage": zero_stage, "max_norm": 0.01}
    got = run_ranks(train, 2, tmp_path, tmp_path / "a", more)[0]
    assert_is_definition(tmp_path / "a", got, tiny_llama(), max_norm=0.01)
    assert min(line["grad_norm"] for line in got[0]) > 0.01


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_so_do_two_times_two(zero_stage, tmp_path):
    got = run_ranks(train, 4, tmp_path, tmp_path / "a", {"zero_stage": zero_stage, "max_norm": 0.01, "micro": 1})[0]
    assert_is_definition(tmp_path / "a", got, tiny_llama(), max_norm=0.01)


@pytest.mark.parametrize(
    ("kind", "changes", "zero_stage"),
    [
        ("Qwen2", {}, 1),  # biases of what is cut by columns
        ("Qwen3", {"tie_word_embeddings": True}, 2),  # norms of single heads, whose gradients are of a part
        ("Qwen3", {}, 3),
        ("Gemma3", {"sliding_window": 8}, 3),  # tied, scaled embeddings, norms behind the sums
        ("Llama", {"attention_bias": True, "mlp_bias": True}, 3),  # biases of what is cut by rows
    ],
)
def test_architectures_with_a_plan_of_plain_columns_and_rows(kind, changes, zero_stage, tmp_path):
    more = {"kind": kind, "changes": changes, "zero_stage": zero_stage}
    got = run_ranks(train, 2, tmp_path, tmp_path / "a", more)[0]
    assert_is_definition(tmp_path / "a", got, tiny(kind, **changes))


@pytest.mark.parametrize("zero_stage", STAGES)
@pytest.mark.parametrize("ref_mode", ["adapter", "model"])
def test_an_adapter_follows_the_layers_that_it_is_on(zero_stage, ref_mode, tmp_path):
    more = {"zero_stage": zero_stage, "lora": LORA, "ref_mode": ref_mode}
    got = run_ranks(train, 2, tmp_path, tmp_path / "a", more)[0]
    assert_is_definition(tmp_path / "a", got, Actor(tiny_llama(), lora=LORA).model, reference=tiny_llama())


# ---- checkpoints ----------------------------------------------------------------------------------------------------

SPLIT = {"tensor_parallel_size": 2}


def split_start(folder, zero_stage, stop, more):
    return resume.start(folder, zero_stage, {"stop_after_steps": stop}, **more)


def run(tmp_path, folder, *starts, **more):
    """Run several starts, each (ranks, ZeRO stage, stop after, settings); return the last one's weights."""
    for world_size, zero_stage, stop, settings in starts:
        weights = run_ranks(split_start, world_size, tmp_path, tmp_path / folder, zero_stage, stop, settings | more)[0]
    return weights


@pytest.mark.parametrize("zero_stage", STAGES)
def test_a_resumed_run_is_bit_equal(zero_stage, tmp_path):
    whole = run(tmp_path, "whole", (2, zero_stage, None, SPLIT))
    cut = run(tmp_path, "cut", (2, zero_stage, 2, SPLIT), (2, zero_stage, None, SPLIT))
    assert resume.worst(whole, cut) == 0.0
    assert resume.records(tmp_path / "cut") == resume.records(tmp_path / "whole")


def test_a_run_goes_on_where_the_weights_lie_otherwise(tmp_path):
    whole = run(tmp_path, "whole", (1, 2, None, {}))
    places = [
        (2, 0, SPLIT),
        (1, 3, {}),
        (2, 3, SPLIT),
        (2, 2, SPLIT),
        (1, 0, {}),
        (4, 3, SPLIT),
        (2, 1, {}),
        (2, 1, SPLIT),
    ]
    for before, after in zip(places, [*places[1:], *places[:1]], strict=True):
        folder = "-".join(f"{ranks}{stage}{len(settings)}" for ranks, stage, settings in (before, after))
        (a, b, c), (d, e, f) = before, after
        resumed = run(tmp_path, folder, (a, b, 3, c), (d, e, None, f))
        assert resume.worst(whole, resumed) < 1e-6, folder


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_dropout_in_an_adapter_is_the_same_on_both_ranks_and_goes_on(zero_stage, tmp_path):
    more = {"lora": LoraConfig(lora_rank=4, lora_dropout=0.3), "ref_mode": "adapter"}
    whole = run(tmp_path, "whole", (2, zero_stage, None, SPLIT), **more)
    cut = run(tmp_path, "cut", (2, zero_stage, 3, SPLIT), (2, zero_stage, None, SPLIT), **more)
    assert resume.worst(whole, cut) == 0.0


# ---- what goes with it ----------------------------------------------------------------------------------------------


def compared(tmp_path, more, rel=1e-5, **one):
    """Compare two ranks that share the weights with one that does not."""
    alone = run_ranks(train, 1, tmp_path, tmp_path / "one", more | {"tensor_parallel_size": 1} | one)[0]
    shared = run_ranks(train, 2, tmp_path, tmp_path / "two", more)[0]
    for line, other in zip(alone[0], shared[0], strict=True):
        assert line.keys() == other.keys()
        for name in ("loss", "kl", "grad_norm", "entropy", "rewards/chosen", "padding_fraction", "num_tokens"):
            if name in line:
                assert other[name] == pytest.approx(line[name], rel=rel, abs=rel), name
    return alone, shared


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_checkpointing": True, "zero_stage": 2},
        {"gradient_checkpointing": True, "use_reentrant": True, "zero_stage": 3},
        {"gradient_checkpointing": True, "use_reentrant": True, "lora": LORA, "ref_mode": "adapter", "zero_stage": 1},
        {"ref_sync_steps": 1, "ref_sync_alpha": 0.5, "zero_stage": 0},
        {"ref_sync_steps": 1, "ref_sync_alpha": 0.5, "zero_stage": 3},
        {"loss_type": "kto_humanline", "zero_stage": 1},
        {"loss_type": "bco", "sft_loss_coef": 0.5, "zero_stage": 1},
        {"lora": LoraConfig(lora_rank=4, lora_modules_to_save=["lm_head"]), "ref_mode": "adapter", "zero_stage": 2},
    ],
)
def test_settings_that_go_with_it(more, tmp_path):
    compared(tmp_path, more)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_half_precision(zero_stage, tmp_path):
    compared(tmp_path, {"zero_stage": zero_stage, "param_dtype": "bf16"}, rel=0.05)
