"""The FLOPs of a planned step are those of the batches that the loader makes, shared prompts run once."""

from dataclasses import replace

import pytest

from openkto.batches.loader import KTODataLoader
from openkto.models import Actor
from openkto.planning.work import dealt_batches, largest_shapes, mean_step
from openkto.report.flops import StepWork, forward_work
from openkto.trainer.planning import plan_for
from tests.tiny import tiny_llama, token_rows

LABELS = [True, False, True, False] * 6


def planned(share_prompts: str, ranks: int = 2, **layout: int | bool):
    actor = Actor(tiny_llama(), share_prompts=share_prompts)
    rows = token_rows(LABELS, 3, longest=30, answers=3)
    loaders = [KTODataLoader(rows, 12, 4, rank=rank, world_size=ranks, seed=1) for rank in range(ranks)]
    plan_for(loaders, actor, reference_runs=True)
    for loader in loaders:
        loader.layout = replace(loader.layout, **layout)
    work = forward_work(actor)
    return loaders, work, mean_step(loaders[0], dealt_batches(loaders[0]), work, work)


@pytest.mark.parametrize(
    ("share_prompts", "layout"),
    [
        ("auto", {}),
        ("off", {}),
        ("auto", {"held_tokens": 10**6}),
        ("auto", {"held_tokens": 10**6, "shares_pairs": False}),
    ],
)
def test_a_step_is_planned_with_the_work_of_the_batches_that_run(share_prompts, layout):
    loaders, work, step = planned(share_prompts, **layout)
    step_work = StepWork(work, work)
    runs = [sum(step_work.of(batch) for batch in loader) / len(loader) for loader in loaders]
    assert step.training + step.mismatched + step.reference == pytest.approx(sum(runs), rel=1e-12)


def test_shared_prompts_take_less_and_the_whole_of_a_cache_shares_most():
    _, _, apart = planned("off")
    _, _, shared = planned("auto")
    assert shared.training < apart.training
    assert shared.mismatched < apart.mismatched
    assert shared.reference < 0.9 * apart.reference
    assert apart.filling == pytest.approx(apart.reference)
    assert shared.filling <= shared.reference
    assert shared.filling_later < shared.filling
    _, _, reused = planned("auto", held_tokens=10**6)
    assert reused.mismatched < shared.mismatched


def test_the_largest_micro_batch_without_gradient_holds_a_shared_prompt_once():
    loaders, _, _ = planned("auto")
    batches = dealt_batches(loaders[0])
    _, without = largest_shapes(loaders[0], batches)
    made = [m["input_ids"].numel() for loader in loaders for b in loader for m in (*b.matched, *b.shared)]
    made += [m["kl_input_ids"].numel() for loader in loaders for b in loader for m in b.mismatched]
    assert loaders[0].layout.packed
    assert without.rows == 1
    assert without.length <= max(made)
