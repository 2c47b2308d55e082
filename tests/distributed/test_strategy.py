"""DeepspeedStrategy at every ZeRO stage: norms, clipping, what is not finite, precision, whole weights."""

import os
import time

import pytest
import torch
from deepspeed.utils import groups

from openkto.distributed.gather import gather_weights
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.distributed.zero_options import ZeroOptions
from openkto.errors import ConfigError, TrainingError
from openkto.models import Actor
from openkto.models.onednn import is_faster_here
from tests.helpers.records import lines as lines_of
from tests.ranks import run_ranks
from tests.tiny import make_trainer, quiet_args, tiny_llama, token_rows

STAGES = [0, 1, 2, 3]
CORNERS = [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1)), 2, 3]


class Times:
    """A loss, times a factor."""

    def __init__(self, loss, factor) -> None:
        self.loss, self.factor = loss, factor

    def __call__(self, *args):
        return self.factor * self.loss(*args)

    def __getattr__(self, name):
        return getattr(self.loss, name)


def tiny_tied_llama():
    return tiny_llama(tie_word_embeddings=True)


@pytest.mark.parametrize(("zpg", "is_changed"), [(1, False), (2, True)])
def test_nothing_of_deepspeed_is_changed_without_zpg_nor_once_models_are_loaded(zpg, is_changed):
    strategy = DeepspeedStrategy(zero_stage=3, param_dtype="fp32", zero=ZeroOptions(zpg=zpg))
    own = groups._create_zero_param_parallel_group
    with strategy.model_loading():
        assert (groups._create_zero_param_parallel_group is not own) == is_changed
    assert groups._create_zero_param_parallel_group is own


def gather_uneven_rows():
    strategy = DeepspeedStrategy(param_dtype="fp32")
    strategy.setup_distributed()
    mine = torch.full((2 * strategy.rank, 3), float(strategy.rank))  # none, two and four rows
    rows = strategy.gather_rows(mine)
    return (
        rows.tolist(),
        strategy.all_reduce([1.0, strategy.rank]).tolist(),
        strategy.all_reduce([strategy.rank], "max"),
    )


def test_ranks_with_different_numbers_of_rows_are_gathered(tmp_path):
    for rows, total, largest in run_ranks(gather_uneven_rows, 3, tmp_path):
        assert rows == [[1.0] * 3] * 2 + [[2.0] * 3] * 4
        assert total == [3.0, 3.0]
        assert float(largest) == 2.0


def last_grad_norm_and_weights(folder, zero_stage, max_norm, param_dtype="fp32", model=None, **more):
    trainer, _ = make_trainer(
        token_rows([True, False, True, False]), zero_stage=zero_stage, batch=4, micro=1, lr=1e-3, steps=2,
        max_norm=max_norm, param_dtype=param_dtype, model=model, **more,
    )  # fmt: skip
    norms = []
    step = trainer.strategy.step
    trainer.strategy.step = lambda engine: norms.append(step(engine)) or norms[-1]
    trainer.fit(quiet_args(folder, 2))
    weights = gather_weights(trainer.model.module.model, torch.float32)
    return [n.grad_norm for n in norms], weights


def test_the_gradient_norm_is_one_float_and_the_same_at_every_stage(tmp_path):
    runs = [run_ranks(last_grad_norm_and_weights, 2, tmp_path, tmp_path / f"{s}", s, 0.01)[0] for s in STAGES]
    for norms, weights in runs:
        assert all(type(n) is float for n in norms)
        assert norms == pytest.approx(runs[0][0], rel=1e-4)
        assert min(norms) > 0.01  # before clipping
        for name, value in weights.items():
            torch.testing.assert_close(value, runs[0][1][name], rtol=0, atol=1e-5)


def test_tied_weights_stay_tied_and_whole(tmp_path):
    for stage in (0, 3):
        (_, weights) = run_ranks(
            last_grad_norm_and_weights, 2, tmp_path, tmp_path / f"{stage}", stage, 1.0, "fp32", tiny_tied_llama
        )[0]
        assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
        assert weights["lm_head.weight"].shape == (61, 32)


def checkpointed(folder, zero_stage, **checkpointing):
    return last_grad_norm_and_weights(folder, zero_stage, 1.0, **checkpointing)[0]


@pytest.mark.parametrize("zero_stage", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2)), 3])
def test_gradient_checkpointing_changes_nothing(zero_stage, tmp_path):
    plain = run_ranks(checkpointed, 2, tmp_path, tmp_path / "a", zero_stage)[0]
    for use_reentrant in (False, True):
        norms = run_ranks(checkpoint_run, 2, tmp_path, tmp_path / f"{use_reentrant}", zero_stage, use_reentrant)[0]
        assert norms == pytest.approx(plain, rel=1e-5)


def checkpoint_run(folder, zero_stage, use_reentrant):
    return checkpointed(folder, zero_stage, gradient_checkpointing=True, use_reentrant=use_reentrant)


def poisoned_llama():
    model = tiny_llama()
    model.model.embed_tokens.weight.data[5] = float("nan")
    return model


def train_on_a_poisoned_row(folder, zero_stage, poison):
    rows = token_rows([True, False] * 3)
    for item in rows.items:
        item["prompt_ids"] = [6 if t == 5 else t for t in item["prompt_ids"]]
        item["completion_ids"] = [6 if t == 5 else t for t in item["completion_ids"]]
    if poison == "log-probability":
        rows.items[4]["prompt_ids"][0] = 5  # the one token whose embedding is not a number
    trainer, _ = make_trainer(rows, zero_stage=zero_stage, batch=6, micro=2, model=poisoned_llama)
    if poison == "gradient":
        trainer.loss = Times(trainer.loss, float("nan"))
    before = {n: p.detach().clone() for n, p in trainer.model.module.named_parameters()} if zero_stage < 3 else {}
    with pytest.raises(TrainingError) as error:
        trainer.fit(quiet_args(folder, 1))
    same = all(
        torch.equal(p.nan_to_num(), before[n].nan_to_num())
        for n, p in trainer.model.module.named_parameters()
        if n in before
    )
    return str(error.value), same


@pytest.mark.parametrize("zero_stage", CORNERS)
def test_a_row_that_is_not_finite_stops_all_ranks_and_is_named(zero_stage, tmp_path):
    for message, weights_stayed in run_ranks(
        train_on_a_poisoned_row, 2, tmp_path, tmp_path / "out", zero_stage, "log-probability"
    ):
        assert message.startswith("step 1: every log-probability must be finite; got nan")
        assert "Look at row 4 (counted from 0)" in message
        assert weights_stayed


@pytest.mark.parametrize("zero_stage", CORNERS)
def test_a_gradient_that_is_not_finite_is_never_applied(zero_stage, tmp_path):
    for message, weights_stayed in run_ranks(
        train_on_a_poisoned_row, 2, tmp_path, tmp_path / "out", zero_stage, "gradient"
    ):
        assert message.startswith("step 1: the gradient is not finite (norm ")
        assert "the update was not made. Look at rows 0, 1, 2, 3, 4, 5" in message
        assert weights_stayed


def bf16_run(folder, zero_stage):
    trainer, _ = make_trainer(
        token_rows([True, False, True, False]),
        zero_stage=zero_stage,
        batch=4,
        micro=2,
        lr=5e-7,
        steps=10,
        param_dtype="bf16",
    )
    trainer.fit(quiet_args(folder, 10))
    masters = gather_weights(trainer.model.module.model, torch.float32)
    return masters["model.norm.weight"] if masters else None


@pytest.mark.parametrize("zero_stage", CORNERS)
def test_bfloat16_trains_float32_masters_that_small_steps_do_move(zero_stage, tmp_path):
    norm_weight = run_ranks(bf16_run, 2, tmp_path, tmp_path / "out", zero_stage)[0]
    moved = (norm_weight - 1.0).abs()
    assert norm_weight.dtype == torch.float32
    assert 1e-6 < float(moved.max()) < 1e-5  # 10 steps of 5e-7: bfloat16 itself would stay at 1.0


def start_with_a_stale_lock(folder):
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    for op in ("deepspeed_shm_comm", "cpu_adam", "fused_adam"):
        (folder / op).mkdir(parents=True, exist_ok=True)
        (folder / op / "lock").touch()
    started = time.monotonic()
    trainer, _ = make_trainer(token_rows([True, False]), zero_stage=2, batch=2)
    trainer.fit(quiet_args(folder / "out", 1))
    return time.monotonic() - started


def test_a_start_builds_no_op_and_waits_for_no_stale_lock(tmp_path):
    assert max(run_ranks(start_with_a_stale_lock, 2, tmp_path, tmp_path, timeout=60)) < 30


def offloaded_run(folder, ref_offload):
    strategy = DeepspeedStrategy(
        param_dtype="fp32", zero_stage=2, zero=ZeroOptions(adam_offload=True, ref_offload=ref_offload)
    )
    strategy.setup_distributed()
    actor, reference = Actor(tiny_llama()), Actor(tiny_llama())
    optimizer = strategy.create_optimizer(actor, lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    (engine, _, _), reference = strategy.prepare((actor, optimizer, scheduler), reference)
    ids = torch.arange(3, 23).view(2, 10)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    with torch.no_grad(), strategy.reference_forward(reference):
        reference_log_prob = reference(ids, torch.ones_like(ids), mask).log_prob_B
    log_prob = engine(ids, torch.ones_like(ids), mask).log_prob_B
    strategy.backward(engine, log_prob.sum().float() / strategy.world_size, is_last=True)
    decays = [g["weight_decay"] for g in engine.optimizer.param_groups]
    layers = [model.language_model.model.layers[0].mlp.up_proj for model in (engine.module, reference)]
    products = {layer.forward.__func__.__module__ for layer in layers}
    return strategy.step(engine).applied, float((log_prob - reference_log_prob).abs().max()), decays, products


def test_offload_flags_train_and_norms_do_not_decay(tmp_path):
    for applied, difference, decays, products in run_ranks(offloaded_run, 2, tmp_path, tmp_path, True):
        assert applied
        assert difference == 0.0
        assert decays == [0.1, 0.0]
        assert products == {"openkto.models.onednn" if is_faster_here() else "torch.nn.modules.linear"}


def fp16_run(folder, zero_stage, factor, steps):
    from deepspeed.accelerator import get_accelerator

    # torch's CPU kernels do float16; DeepSpeed asks for a processor that is fast at it.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    trainer, _ = make_trainer(
        token_rows([True, False] * 2), zero_stage=zero_stage, batch=4, micro=2, lr=1e-3, steps=steps,
        param_dtype="fp16", schedule="linear",
    )  # fmt: skip
    trainer.loss = Times(trainer.loss, factor)
    try:
        trainer.fit(quiet_args(folder, steps))
    except TrainingError as error:
        return str(error), trainer.model.module.model.lm_head.weight.isfinite().all().item()
    return "", True


@pytest.mark.parametrize("zero_stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_a_float16_overflow_skips_the_update_and_the_schedule_waits(zero_stage, tmp_path):
    # Times 1000 the gradients overflow at the first scales and fit at lower ones.
    assert run_ranks(fp16_run, 2, tmp_path, tmp_path, zero_stage, 1000.0, 12)[0] == ("", True)
    lines = lines_of(tmp_path)
    skipped = lines[-1]["skipped_steps"]
    assert 0 < skipped < 12
    assert lines[-1]["learning_rate"] == pytest.approx(1e-3 * (1 - (12 - skipped) / 12))
    assert "grad_norm" not in lines[0]
    assert lines[-1]["grad_norm"] > 0


def start_in_float16():
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: False
    with pytest.raises(ConfigError) as error:
        DeepspeedStrategy(param_dtype="fp16", zero_stage=1).setup_distributed()
    return str(error.value)


def test_a_dtype_that_the_device_lacks_is_refused(tmp_path):
    (message,) = run_ranks(start_in_float16, 1, tmp_path)
    assert message == "--param_dtype: the device must support fp16; got one that does not. Pass --param_dtype fp32."


def test_float16_without_a_zero_stage_is_refused():
    with pytest.raises(ConfigError, match="fp16 needs a ZeRO stage; got --zero_stage 0"):
        DeepspeedStrategy(param_dtype="fp16", zero_stage=0)


@pytest.mark.parametrize("zero_stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_float16_stops_at_the_smallest_loss_scale(zero_stage, tmp_path):
    message, is_finite = run_ranks(fp16_run, 2, tmp_path, tmp_path, zero_stage, 1e12, 80)[0]
    assert "fp16 overflows at the smallest loss scale, 1.0. Use --param_dtype bf16 or fp32." in message
    assert is_finite or zero_stage == 3


def refuse_what_cannot_train():
    strategy = DeepspeedStrategy(zero_stage=0)
    strategy.setup_distributed()
    shared = tiny_llama()
    actor = Actor(shared)
    optimizer = strategy.create_optimizer(actor, lr=1e-3)
    messages = []
    for reference in (actor, Actor(shared)):
        with pytest.raises(ConfigError) as error:
            strategy.prepare((actor, optimizer, None), reference)
        messages.append(str(error.value))
    with pytest.raises(ConfigError) as error:
        strategy.create_optimizer(actor.requires_grad_(False), lr=1e-3)
    return [*messages, str(error.value)]


def test_a_frozen_policy_and_one_that_is_its_own_reference_are_one_sentence_each(tmp_path):
    ((same_actor, same_model, frozen),) = run_ranks(refuse_what_cannot_train, 1, tmp_path)
    assert same_actor == same_model
    assert same_actor.startswith("ref_model: must have parameters of its own, which stay as they are; got the policy")
    assert frozen.startswith("model: must have parameters that train; got Actor with all of them frozen.")
