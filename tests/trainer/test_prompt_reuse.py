"""Mismatched pairs go on after the prompts of the matched rows: when, in which order, and with the same numbers."""

import logging
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from openkto.batches.layout import Layout
from openkto.batches.loader import KTODataLoader
from openkto.batches.sharing import PairPlan, plan_after_prompts
from openkto.config import LoraConfig
from openkto.distributed import free_memory
from openkto.distributed.zero_options import ZeroOptions
from openkto.models import Actor
from openkto.models.live_tensors import LiveTensors
from openkto.models.loss import KTOLoss
from openkto.planning.activations import Shape, count_training
from openkto.report.flops import ForwardWork, StepWork
from openkto.trainer import prompt_reuse
from openkto.trainer.forwards import forward_before_backward, forward_with_gradient, to_device
from openkto.trainer.largest_micro_batch import try_micro_batch
from openkto.trainer.planning import plan_for
from openkto.trainer.prompt_reuse import settle_reuse
from openkto.trainer.reference import ModelReference
from openkto.trainer.rows import part_of_loss
from openkto.trainer.run_state import RunState
from tests.helpers.runs import MIXED, assert_same, train
from tests.helpers.stand_in import Engine, StandIn, prepared
from tests.ranks import run_ranks
from tests.tiny import quiet_args, tiny_llama, token_rows

CPU = torch.device("cpu")


def a_loader(actor, rows, micro=3, by_token=False, **more):
    loader = KTODataLoader(rows, len(rows), micro, **more)
    plan_for([loader], actor, reference_runs=True, by_token=by_token)
    return loader


def batch_of(loader, held_tokens):
    loader.layout = replace(loader.layout, held_tokens=held_tokens)
    return loader.make_batch(loader.order(0))


# ---- what is laid out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 5])  # one rank has more than one micro-batch, five have a dummy
def test_each_pair_stands_where_its_prompts_row_does_and_runs_from_the_prompts_last_token_on(world_size):
    rows, actor = token_rows([True, False, True, True]), Actor(tiny_llama())
    shares = [batch_of(a_loader(actor, rows, rank=rank, world_size=world_size), 1000) for rank in range(world_size)]
    tokens = 0
    for batch in shares:
        assert batch.reuses_prompts
        for matched, pairs in zip(batch.matched, batch.mismatched, strict=True):
            assert matched["row"].tolist() == pairs["kl_row"].tolist()
            tokens += len(pairs["kl_rest_index"])
            whole = pairs["kl_attention_mask"].flatten().nonzero()[:, 0]
            assert torch.equal(pairs["kl_token_index"], whole)  # as the reference runs it
    counted = int(rows.completion_lengths.sum()) + len(rows)
    dummies = sum(2 * (m["row"] < 0).sum().item() for batch in shares for m in batch.matched)
    assert tokens == counted + dummies
    assert shares[0].mismatched_tokens == counted
    assert shares[0].slots == shares[0].matched_tokens + counted + 2 * dummies


def test_several_micro_batches_are_held_up_to_so_many_tokens_and_one_always_is():
    rows, actor = token_rows([True, False, True, True]), Actor(tiny_llama())
    loader = a_loader(actor, rows)
    tokens = int((rows.prompt_lengths + rows.completion_lengths).sum())
    held = {limit: batch_of(loader, limit).reuses_prompts for limit in (None, 0, tokens - 1, tokens)}
    assert held == {None: False, 0: False, tokens - 1: False, tokens: True}
    assert batch_of(a_loader(actor, rows, micro=4), 0).reuses_prompts


def test_the_fullest_rank_decides_for_all():
    lengths, plan = np.array([1, 5, 2, 6]), [[np.array([0]), np.array([1])], [np.array([2]), np.array([3])]]
    matched = PairPlan(plan, lengths, np.zeros_like(lengths))
    assert plan_after_prompts(matched, lengths, np.ones_like(lengths), 10, None) is None
    assert plan_after_prompts(matched, lengths, np.ones_like(lengths), 11, None) is not None


@pytest.mark.parametrize("factor", [1, 4])  # beside a graph, micro-batches without gradient are no larger
def test_pairs_that_are_too_many_tokens_for_a_micro_batch_are_planned_by_themselves(factor):
    rows, actor = token_rows([True, False] * 4), Actor(tiny_llama())
    for row in rows.items[4:]:
        row["completion_ids"], row["completion_mask"] = [5] * 40, [True] * 40
    rows.__post_init__()
    longest = int((rows.prompt_lengths + rows.completion_lengths).max())
    loader = KTODataLoader(rows, 8, max_tokens_per_micro_batch=longest, larger_without_gradient=factor)
    plan_for([loader], actor)
    batch = batch_of(loader, 10_000)
    assert not batch.reuses_prompts
    assert all(len(m["kl_token_index"]) <= factor * longest for m in batch.mismatched)


def test_a_prompt_that_is_cut_otherwise_runs_again():
    rows, actor = token_rows([True, False] * 4), Actor(tiny_llama())
    rows.truncation, rows.max_len = "prompt", 1 + int((rows.prompt_lengths + rows.completion_lengths).min())
    batch = batch_of(a_loader(actor, rows, micro=8), 0)
    (pairs,), (matched,) = batch.mismatched, batch.matched
    reused_B = pairs["kl_attention_mask"].sum(1) - pairs["kl_rest_bounds"].diff()
    is_cut_B = (
        matched["attention_mask"].sum(1)
        < torch.from_numpy(rows.prompt_lengths + rows.completion_lengths)[
            [rows.rows.tolist().index(row) for row in matched["row"].tolist()]
        ]
    )
    assert is_cut_B.any()
    assert not reused_B[is_cut_B].any()


def test_a_prompt_that_is_cut_in_one_of_its_two_forwards_runs_in_both():
    rows, actor = token_rows([True, False]), Actor(tiny_llama())
    for row, completion in zip(rows.items, (10, 2), strict=True):
        row |= {"prompt_ids": [5 + row["row"], *range(10, 15)], "completion_ids": [7] * completion}
        row["completion_mask"] = [True] * completion
    rows.__post_init__()
    rows.truncation, rows.max_len = "prompt", 12
    batch = batch_of(a_loader(actor, rows), 0)
    (pairs,), (matched,) = batch.mismatched, batch.matched
    assert (
        sorted(matched["attention_mask"].sum(1).tolist())
        == sorted(pairs["kl_attention_mask"].sum(1).tolist())
        == [8, 12]
    )
    assert torch.equal(pairs["kl_rest_bounds"].diff(), pairs["kl_attention_mask"].sum(1))


def test_the_work_of_a_step_is_what_runs():
    rows, actor = token_rows([True, False, True, True, False]), Actor(tiny_llama())
    rows_alone = batch_of(a_loader(actor, rows), 1000)._replace(shared=[])
    unit = ForwardWork(body=1, head=0, trainable_body=1, trainable_head=0, attention=())
    matched = int((rows.prompt_lengths + rows.completion_lengths).sum())
    rest = int(rows.completion_lengths.sum()) + len(rows)
    assert StepWork(unit, None).of(rows_alone) == 2 * (3 * matched + rest)
    assert StepWork(unit, unit).of(rows_alone) == 2 * (3 * matched + rest + 2 * matched)


# ---- what it computes ------------------------------------------------------------------------------------------------


def one_step(actor, reference, batch, loss):
    """Return (loss, z_ref before the clamp, gradients by name, of each forward: whether with gradient, tokens)."""
    ran = []
    hook = actor.body.register_forward_pre_hook(
        lambda _, __, inputs: ran.append((torch.is_grad_enabled(), inputs["input_ids"].numel())), with_kwargs=True
    )
    before = forward_before_backward(
        actor, ModelReference(reference, StandIn()), StandIn(), loss, batch, lambda: None, 0.0, False
    )
    actor.train()
    total = 0.0
    for m, ref_log_prob in enumerate(before.ref_log_prob):
        micro_batch = to_device(batch.matched[m], CPU)
        if not before.outputs:
            before.outputs.append(forward_with_gradient(actor, loss, micro_batch, False))
        part = part_of_loss(loss, batch, micro_batch, before.outputs.pop(0), ref_log_prob, before)
        part.loss.backward()
        total += float(part.loss.detach())
    hook.remove()
    gradients = {name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None}
    actor.zero_grad()
    return total, float(before.mismatched_mean), gradients, ran


WAYS = {
    "float32": {},
    "float64": {"dtype": torch.float64},
    "lora": {"lora": LoraConfig(lora_rank=4)},
    "whole": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "use_reentrant": True},
    "selective": {"gradient_checkpointing": "selective", "lora": LoraConfig(lora_rank=4)},
    "by token": {"loss_type": "kto_humanline"},
}


@pytest.mark.parametrize("answers", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_gives_the_same_in_either_order(way, answers):
    settings = dict(WAYS[way])
    loss = KTOLoss(loss_type=settings.pop("loss_type", "kto"), beta=0.3)
    dtype = settings.pop("dtype", torch.float32)
    actor = Actor(tiny_llama(), **settings).to(dtype)
    reference = Actor(tiny_llama(1)).to(dtype)
    rows = token_rows([True, False, True, True, False, False, True, False], 3, answers=answers)
    loader = a_loader(actor, rows, by_token=loss.facts.by_token)
    old, new = (one_step(actor, reference, batch_of(loader, held), loss) for held in (None, 1000))
    loader.layout = Layout(packed=True)
    apart = one_step(actor, reference, batch_of(loader, None), loss)
    assert apart[1] != 0
    for shared in (old, new):
        assert shared[0] == pytest.approx(apart[0], rel=1e-5)
        assert shared[1] == pytest.approx(apart[1], rel=1e-5)
        assert shared[2].keys() == apart[2].keys() != set()
        for name, gradient in apart[2].items():
            torch.testing.assert_close(shared[2][name], gradient, rtol=1e-5, atol=1e-6)
    with_gradient = [sum(tokens for has, tokens in one[3] if has) for one in (apart, old, new)]
    assert with_gradient[1] == with_gradient[2]
    assert (with_gradient[1] < with_gradient[0]) == (answers == 2)
    rest = int(rows.completion_lengths.sum()) + len(rows)
    # Rows of one prompt stay together, so a limit of three rows is two of them.
    micro_batches = 3 if answers == 1 else 4
    assert [with_gradient for with_gradient, _ in new[3]] == [True, False] * micro_batches
    assert sum(tokens for with_gradient, tokens in new[3] if not with_gradient) == rest
    assert [with_gradient for with_gradient, _ in old[3]][-micro_batches:] == [True] * micro_batches
    assert sum(tokens for with_gradient, tokens in old[3] if not with_gradient) > rest


@pytest.mark.parametrize("checkpointing", [False, "selective", True], ids=["none", "selective", "whole"])
def test_one_micro_batch_takes_at_most_its_keys_and_values_more(checkpointing):
    layers, rows = 5, token_rows([True, False] * 8, 3, longest=50)
    actor, reference = Actor(tiny_llama(num_hidden_layers=layers), gradient_checkpointing=checkpointing), tiny_llama(1)
    rows.max_len = 128
    loader = a_loader(actor, rows, micro=16)
    peaks = {}
    for held in (None, 0):
        batch = batch_of(loader, held)
        assert len(batch.matched) == 1
        live = LiveTensors([*actor.parameters(), *reference.parameters()])
        with live:
            one_step(actor, Actor(reference), batch, KTOLoss())
        peaks[held] = live.peak
    # Of each token two heads of 8, in float32, keys and values.
    assert peaks[0] <= peaks[None] + 2 * 2 * 8 * 4 * layers * batch.matched_tokens


@pytest.mark.parametrize("checkpointing", [False, True], ids=["none", "whole"])
def test_a_trial_of_a_micro_batch_takes_as_much_as_its_step(checkpointing):
    """As many key heads as query heads, and few gradients: keys and values are most of what a step holds."""
    base = tiny_llama(num_hidden_layers=12, num_key_value_heads=4)
    actor = Actor(base, gradient_checkpointing=checkpointing, lora=LoraConfig(lora_rank=1))
    reference, rows = Actor(tiny_llama(1)), token_rows([True, False] * 4)
    for row in rows.items:
        row |= {"prompt_ids": [5 + row["row"]], "completion_ids": [7 + row["row"]] * 63, "completion_mask": [True] * 63}
    rows.__post_init__()
    batch = batch_of(a_loader(actor, rows, micro=8), 0)
    assert batch.reuses_prompts
    peaks = []
    for run in (
        lambda: try_micro_batch(Engine(actor, None), StandIn(), 8, 64, with_gradient=True),
        lambda: one_step(actor, reference, batch, KTOLoss()),
    ):
        live = LiveTensors([*actor.parameters(), *actor.buffers(), *reference.parameters(), *reference.buffers()])
        with live:
            run()
        actor.zero_grad()
        peaks.append(live.peak)
    assert peaks[1] <= 1.05 * peaks[0]


def test_the_reference_runs_before_any_graph_is_held_and_each_rank_beats_as_often():
    actor, reference = Actor(tiny_llama()), Actor(tiny_llama(1))
    ran = {}
    for rank in range(2):
        # Of three rows one rank has two and the other one, and a dummy.
        loader = a_loader(actor, token_rows([True, False, True]), micro=1, rank=rank, world_size=2)
        order, models = ran.setdefault(rank, []), {"policy": actor, "reference": reference}
        hooks = [m.body.register_forward_pre_hook(lambda *_, n=n, o=order: o.append(n)) for n, m in models.items()]
        batch = batch_of(loader, 1000)._replace(shared=[])
        assert batch.reuses_prompts
        beat = lambda o=order: o.append("beat")  # noqa: E731
        own = ModelReference(reference, StandIn())
        forward_before_backward(actor, own, StandIn(), KTOLoss(), batch, beat, 0.0, False)
        for hook in hooks:
            hook.remove()
    assert ran[0] == ran[1] == ["beat", "reference"] * 4 + ["beat", "policy"] * 4


RUNS = {
    "1-2-whole": (1, 2, {"gradient_checkpointing": True}),
    "2-2-selective": (2, 2, {"gradient_checkpointing": "selective"}),
    "2-2-reentrant": (2, 2, {"gradient_checkpointing": True, "use_reentrant": True}),
    "0-2-split": (0, 2, {"tensor_parallel_size": 2}),
    "1-1-lora": (1, 1, {"lora": LoraConfig(lora_rank=4), "ref_mode": "adapter"}),
    "3-2": (3, 2, {}),
}


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=[] if run in ("2-2-reentrant",) else pytest.mark.slow) for run in RUNS],
)
def test_a_run_of_several_micro_batches_gives_the_same_in_either_order(run, tmp_path):
    zero_stage, ranks, more = RUNS[run]
    more = more | {"reference": reference} if "ref_mode" not in more else more
    off, on = (
        run_ranks(run_of, ranks, tmp_path, tmp_path / choice, zero_stage, more | {"share_prompts": choice})
        for choice in ("off", "on")
    )
    assert_same(off[0], on[0])


@pytest.mark.parametrize("zero_stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gradients_of_half_precision_are_summed_once(zero_stage, tmp_path):
    """DeepSpeed keeps a float32 sum beside them, and no forward comes between two backwards any more."""
    more = {"param_dtype": "bf16", "reference": reference}
    off, on = (
        run_ranks(run_of, 2, tmp_path, tmp_path / choice, zero_stage, more | {"share_prompts": choice})[0]
        for choice in ("off", "on")
    )
    for line, other in zip(off[0], on[0], strict=True):
        assert other["grad_norm"] == pytest.approx(line["grad_norm"], rel=0.02)
        assert other["loss"] == pytest.approx(line["loss"], rel=0.01)


def reference():
    return tiny_llama(1)


def run_of(folder, zero_stage, more):
    return train(MIXED, folder, zero_stage, 6, 1, 3, **more)


# ---- when it is taken ------------------------------------------------------------------------------------------------


class AtStage3(StandIn):
    zero_stage = 3


class Compiled(StandIn):
    zero = ZeroOptions(deepcompile=True)


@pytest.mark.parametrize(
    ("strategy", "settings", "reason"),
    [
        (AtStage3(), {}, "ZeRO 3, where each backward must come right after its forward"),
        (Compiled(), {}, r"compiled layers \(--torch_compile, --deepcompile\)"),
        (StandIn(), {"lora": LoraConfig(lora_rank=2, lora_dropout=0.1)}, "--lora_dropout, which is only for matched"),
        (StandIn(), {}, None),
        (StandIn(), {"share_prompts": "off"}, ""),
    ],
)
def test_prompts_are_reused_where_that_can_be_and_else_the_log_says_why(strategy, settings, reason, caplog):
    actor, rows, run = Actor(tiny_llama(), **settings), token_rows([True] * 4), RunState()
    loader = a_loader(actor, rows)
    engine = Engine(actor, torch.optim.AdamW(actor.parameters()))
    with caplog.at_level(logging.DEBUG):
        settle_reuse(run, loader, engine, strategy, is_new=True)
    assert (loader.layout.held_tokens is not None) == (run.held_tokens is not None) == (reason is None)
    if reason is None:
        assert "prompts: the policy's mismatched pairs go on after those of its matched rows" in caplog.text
    elif reason:
        assert caplog.text.count("prompts: the policy's mismatched pairs run them again: ") == 1
        assert re.search(reason, caplog.text)


class OfTwo(StandIn):
    world_size = 2


class BesideAFullerRank(StandIn):
    def all_reduce(self, values, op="sum"):
        return torch.as_tensor(values, dtype=torch.float64).clamp(min=-100.0)


class OnAGPU(StandIn):
    device = torch.device("cuda")


@pytest.mark.parametrize(("strategy", "expected"), [(OfTwo(), 256), (BesideAFullerRank(), 64)])
def test_graphs_take_half_of_what_the_fullest_rank_has_left(strategy, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    actor, run = Actor(tiny_llama()), RunState()
    engine = Engine(actor, torch.optim.AdamW(actor.parameters()))
    moments_and_gradient = 3 * 4 * sum(p.numel() for p in actor.parameters())
    loader = a_loader(actor, token_rows([True] * 4))
    graphs = 500 * prompt_reuse._bytes_a_token(engine, strategy, loader.longest)
    (tmp_path / "memory.max").write_text(str(int(strategy.world_size * (2 * graphs + moments_and_gradient))))
    (tmp_path / "memory.current").write_text("0")
    (tmp_path / "memory.stat").write_text("inactive_file 0")
    settle_reuse(run, loader, engine, strategy, is_new=True)
    assert run.held_tokens == expected


def test_beside_the_largest_micro_batch_that_a_gpu_takes_no_other_graph_is_held():
    actor, run = Actor(tiny_llama()), RunState()
    loader = a_loader(actor, token_rows([True] * 4))
    loader.layout = replace(loader.layout, measured_tokens=64)
    settle_reuse(run, loader, Engine(actor, None), OnAGPU(), is_new=True)
    assert run.held_tokens == 0


@pytest.mark.parametrize("recomputation", ["none", "selective", "whole"])
def test_what_a_tokens_graph_takes_is_what_the_planner_counts(recomputation):
    tokens, how = 64, {"none": False, "selective": "selective", "whole": True}[recomputation]
    actor = Actor(tiny_llama(num_hidden_layers=5), gradient_checkpointing=how)
    with torch.device("meta"):
        counted = Actor(tiny_llama(num_hidden_layers=5))
    planned = count_training(counted, Shape(1, tokens, tokens - 1), recomputation, "cpu").kept / tokens
    found = prompt_reuse._bytes_a_token(Engine(actor, None), StandIn(), tokens)
    assert found == pytest.approx(planned, rel=0.2)


def test_a_resumed_run_holds_as_many_graphs_as_when_it_began(tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_reuse, "USABLE", 1e-12)
    began = prepared(micro=3)
    began.fit(quiet_args(tmp_path, 6, stop_after_steps=2, save_steps=2))
    assert began.run.held_tokens == began.train_dataloader.layout.held_tokens == 0
    monkeypatch.undo()
    resumed = prepared(micro=3)
    resumed.fit(quiet_args(tmp_path, 6, load_checkpoint=True))
    assert resumed.run.held_tokens == resumed.train_dataloader.layout.held_tokens == 0
    afresh = prepared(micro=3)
    afresh.fit(quiet_args(tmp_path / "afresh", 1))
    assert afresh.run.held_tokens == afresh.train_dataloader.layout.held_tokens > 1000


def test_a_run_that_an_older_version_began_keeps_its_order():
    actor, rows = Actor(tiny_llama()), token_rows([True] * 4)
    loader, run = a_loader(actor, rows), RunState.from_json({"step": 3})
    settle_reuse(run, loader, Engine(actor, None), StandIn(), is_new=False)
    assert loader.layout.held_tokens is None
