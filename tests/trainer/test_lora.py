"""LoRA under DeepSpeed: both modes of the reference give the same numbers at every stage and number of ranks."""

import pytest
import torch

from openkto.config import LoraConfig
from openkto.distributed.gather import gather_weights
from openkto.models import Actor
from tests.helpers.definition import assert_is_definition
from tests.helpers.records import batches
from tests.helpers.records import lines as read_lines
from tests.helpers.runs import assert_same
from tests.models.zoo import tiny_model
from tests.ranks import run_ranks
from tests.tiny import VOCABULARY, Oracle, make_trainer, quiet_args, tiny_llama, token_rows

MIXED = [True, False, True, True, False, False, True]
LORA = LoraConfig(lora_rank=4, lora_alpha=8)
LR, BETA, STEPS = 1e-3, 0.3, 3  # an epoch, whose second batch is smaller, and one step more
MODES = ("adapter", "model")


def train(folder, more=None, lora=LORA):
    """Train an adapter; return (metrics lines, what trained) on rank 0, None elsewhere."""
    settings = {"lr": LR, "beta": BETA, "ref_mode": "adapter", "micro": 2} | (more or {})
    start = settings.pop("start", None)
    steps = settings.pop("steps", STEPS)
    if start is not None:
        settings["model"] = lambda: start
    trainer, strategy = make_trainer(token_rows(MIXED, 3), batch=4, steps=steps, lora=lora, **settings)
    trainer.fit(quiet_args(folder, steps, log_batches=True, eval_at_start="eval_rows" in settings))
    weights = gather_weights(trainer.model.module.model, torch.float32, trainable_only=True)
    return (read_lines(folder), weights) if strategy.rank == 0 else None


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """One rank, one micro-batch, a second model as the reference."""
    folder = tmp_path_factory.mktemp("one")
    return *run_ranks(train, 1, folder, folder, {"ref_mode": "model", "micro": 4})[0], folder


def test_an_adapter_trains_as_the_definition_says_in_float64(one_rank):
    lines, weights, folder = one_rank
    oracle = Oracle(Actor(tiny_llama(), lora=LORA).model, beta=BETA, lr=LR, reference=tiny_llama())
    assert_is_definition(folder, (lines, weights), token_rows(MIXED, 3), oracle)
    assert len(weights) == 2 * 7 * 2  # A and B of seven linear layers in two blocks


@pytest.mark.parametrize(
    ("world_size", "mode", "zero_stage"),
    [
        *(pytest.param(1, "adapter", n, marks=pytest.mark.slow) for n in range(4)),
        (2, "adapter", 3),
        (2, "model", 2),
        *(pytest.param(2, "adapter", n, marks=pytest.mark.slow) for n in (0, 1, 2)),
        *(pytest.param(2, "model", n, marks=pytest.mark.slow) for n in (0, 1, 3)),
    ],
)
def test_both_reference_modes_give_the_same_numbers_everywhere(one_rank, zero_stage, world_size, mode, tmp_path):
    more = {"zero_stage": zero_stage, "ref_mode": mode}
    assert_same(one_rank[:2], run_ranks(train, world_size, tmp_path, tmp_path / "a", more)[0])


@pytest.mark.parametrize("zero_stage", [*(pytest.param(n, marks=pytest.mark.slow) for n in range(3)), 3])
# Without, ZeRO 3 is in test_strategy.py, and an adapter in test_recompute.py.
@pytest.mark.parametrize("use_reentrant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradient_checkpointing_changes_no_gradient(one_rank, zero_stage, use_reentrant, tmp_path):
    more = {"zero_stage": zero_stage, "gradient_checkpointing": True, "use_reentrant": use_reentrant}
    lines, weights = run_ranks(train, 2, tmp_path, tmp_path / "a", more)[0]
    assert_same(one_rank[:2], (lines, weights))
    # These start at zero: a gradient came to each layer.
    b_matrices = [tensor for name, tensor in weights.items() if "lora_B" in name]
    assert len(b_matrices) == 14
    assert all(bool(tensor.any()) for tensor in b_matrices)


@pytest.mark.parametrize(
    ("zero_stage", "dtype", "mode"),
    [
        *(pytest.param(0, dtype, mode, marks=pytest.mark.slow) for dtype in ("fp32", "bf16") for mode in MODES),
        (3, "fp32", "adapter"),
        (2, "bf16", "model"),
        pytest.param(3, "fp32", "model", marks=pytest.mark.slow),
        pytest.param(2, "bf16", "adapter", marks=pytest.mark.slow),
    ],
)
def test_rewards_are_exactly_zero_before_the_first_update(mode, zero_stage, dtype, tmp_path):
    # In float32 another layout of the reference's rows would give other round-off; in bf16 `auto` leaves them theirs.
    share = "off" if dtype == "fp32" else "auto"
    more = {"zero_stage": zero_stage, "ref_mode": mode, "param_dtype": dtype, "steps": 1, "share_prompts": share}
    (line,), _ = run_ranks(train, 2, tmp_path, tmp_path / "a", more)[0]
    assert line["rewards/chosen"] == line["rewards/rejected"] == line["kl_unclamped"] == 0.0
    assert line["loss"] == 0.5
    assert line["grad_norm"] > 0


def write_start(folder):
    """Save a base model and, as `adapter`, a random adapter on it that changes what it computes."""
    tiny_llama().save_pretrained(folder / "base")
    actor = Actor(str(folder / "base"), lora=LoraConfig(lora_rank=4, lora_alpha=8, lora_dropout=0.5))
    torch.manual_seed(5)
    for name, parameter in actor.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    actor.model.save_pretrained(folder / "adapter")
    return str(folder / "adapter"), actor


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """An adapter's folder, and a run on one rank that starts from it beside a second model that holds it."""
    folder = tmp_path_factory.mktemp("started")
    start, actor = write_start(folder)
    more = {"ref_mode": "model", "start": start, "share_prompts": "off"}
    return start, actor, folder, run_ranks(train, 1, folder, folder, more, None)[0]


def test_training_that_starts_from_an_adapter_has_that_adapter_as_its_reference(started):
    _, actor, folder, (lines, weights) = started
    assert lines[0]["rewards/chosen"] == lines[0]["kl_unclamped"] == 0.0
    assert lines[-1]["rewards/chosen"] != 0.0
    # The policy of the first step is base and adapter together, not the base.
    rows = [token_rows(MIXED, 3).items[r] for r in batches(folder)[0]["rows"]]
    with torch.no_grad():
        log_probs = [float(Oracle._log_prob(actor.model.eval(), row, row)) for row in rows if row["label"]]
    assert lines[0]["logps/chosen"] == pytest.approx(sum(log_probs) / len(log_probs), rel=1e-5)
    assert len(weights) == 28


@pytest.mark.parametrize("zero_stage", [*(pytest.param(n, marks=pytest.mark.slow) for n in range(3)), 3])
def test_a_frozen_copy_of_the_start_is_the_same_reference_as_a_second_model(started, zero_stage, tmp_path):
    start, *_, expected = started
    more = {"zero_stage": zero_stage, "start": start, "share_prompts": "off"}
    got = run_ranks(train, 2, tmp_path, tmp_path / "a", more, None)[0]
    assert got[0][0]["rewards/chosen"] == got[0][0]["kl_unclamped"] == 0.0
    assert_same(expected, got)


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_dropout_is_in_the_forwards_that_train_and_nowhere_else(started, dropout, tmp_path):
    """The learning rate moves nothing, so policy and reference stay the same but for dropout."""
    more = {"start": started[0], "steps": 3, "lr": 1e-12, "eval_rows": token_rows([True, False, True], seed=4)}
    lines, _ = run_ranks(train, 2, tmp_path, tmp_path / "a", more, LoraConfig(lora_dropout=dropout))[0]
    for line in [*lines, *read_lines(tmp_path / "a", "eval")]:
        assert abs(line["kl_unclamped"]) < 1e-4
        is_near = abs(line["rewards/chosen"]) < 1e-4
        assert is_near is (dropout == 0.0 or line["kind"] == "eval")
    assert len(read_lines(tmp_path / "a", "eval")) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"use_dora": True},
        {"use_rslora": True, "target_modules": ["q_proj", "mlp.up_proj", "embed_tokens"]},
        pytest.param({"lora_modules_to_save": ["lm_head"]}, marks=pytest.mark.slow),
    ],
    ids=["dora", "rslora-embedding", "whole-head"],
)
def test_every_kind_of_adapter_is_the_same_sharded(change, tmp_path):
    lora = LoraConfig(lora_rank=4, **change)
    alone = run_ranks(train, 1, tmp_path, tmp_path / "a", {"ref_mode": "model", "steps": 2}, lora)[0]
    assert alone[0][0]["rewards/chosen"] == pytest.approx(0.0, abs=1e-6)
    assert all(bool(tensor.any()) for tensor in alone[1].values())
    assert_same(alone, run_ranks(train, 2, tmp_path, tmp_path / "b", {"zero_stage": 3, "steps": 2}, lora)[0])


def draw():
    make_trainer(token_rows(MIXED, 3), lora=LORA)
    return torch.rand(4)


def test_ranks_draw_dropout_of_their_own_on_the_same_weights(tmp_path):
    first, second = run_ranks(draw, 2, tmp_path)
    assert not torch.equal(first, second)


def test_an_adapter_on_experts_trains_alike_on_one_rank_and_sharded_over_two(tmp_path):
    base = tmp_path / "base"
    changes = dict(vocab_size=VOCABULARY)
    tiny_model("glm4_moe", **changes).float().save_pretrained(base)
    lora = LoraConfig(lora_rank=2, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    more = {"start": str(base), "steps": 2}
    alone = run_ranks(train, 1, tmp_path, tmp_path / "a", more, lora)[0]
    assert len([name for name in alone[1] if ".experts." in name]) == 8  # two layers' A and B of two stacks
    sharded = more | {"zero_stage": 3, "gradient_checkpointing": True}
    assert_same(alone, run_ranks(train, 2, tmp_path, tmp_path / "b", sharded, lora)[0])
