"""Every loss, trained: its definition in float64, and the first promise for each, with all terms on."""

from itertools import pairwise

import pytest
import torch

from openkto.config import LoraConfig
from openkto.distributed.gather import gather_weights
from openkto.trainer.run_state import RunState
from tests.helpers.definition import assert_is_definition
from tests.helpers.records import assert_close, assert_same_lines, batches, lines
from tests.ranks import run_ranks
from tests.tiny import Oracle, make_trainer, quiet_args, tiny_llama, token_rows

MIXED = [True, False, True, True, False, False, True, False, True, False, False]
ROW_WEIGHTS = [1.0, 0.5, 2.0, 0.0, 1.0, 3.0, 0.25, 1.0, 1.0, 0.75, 1.5]
SEED, STEPS = 3, 4
LR, BETA, WEIGHTS, BOUNDS = 3e-4, 0.3, (1.3, 0.7), (-0.02, 0.03)
TERMS = {"label_smoothing": 0.1, "sft_loss_coef": 0.2}
LOSSES = ["kto", "apo_zero_unpaired", "kto_length_normalized", "bco", "kto_humanline"]
SAME = ("loss", "sft_loss", "kl", "kl_unclamped", "rewards/shift", "rewards/chosen", "rewards/rejected", "logps/chosen")


def settings_of(loss_type, terms):
    settings = {"loss_type": loss_type, "desirable_weight": WEIGHTS[0], "undesirable_weight": WEIGHTS[1]} | terms
    if loss_type == "kto_humanline":
        settings |= {"humanline_low": BOUNDS[0], "humanline_high": BOUNDS[1]}
    return settings


def train(folder, loss_type, labels=MIXED, weights=ROW_WEIGHTS, zero_stage=0, batch=4, micro=4, terms=TERMS):
    """Train; return the final weights, whole on rank 0."""
    trainer, _ = make_trainer(
        token_rows(labels, SEED, weights=weights), zero_stage=zero_stage, batch=batch, micro=micro, lr=LR, beta=BETA,
        steps=STEPS, **settings_of(loss_type, terms),
    )  # fmt: skip
    trainer.fit(quiet_args(folder, STEPS, log_batches=True))
    return gather_weights(trainer.model.module.model, torch.float32)


@pytest.fixture(scope="module", params=LOSSES)
def one_rank(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, run_ranks(train, 1, folder, folder, request.param)[0]


def test_one_rank_equals_the_definition_in_float64(one_rank):
    loss_type, folder, weights = one_rank
    rows = token_rows(MIXED, SEED, weights=ROW_WEIGHTS)
    oracle = Oracle(
        tiny_llama(), beta=BETA, weights=WEIGHTS, lr=LR, loss_type=loss_type, bounds=BOUNDS, **TERMS
    )  # fmt: skip
    found = lines(folder)
    steps = assert_is_definition(folder, (found, weights), rows, oracle)
    needs_pairs = loss_type not in ("apo_zero_unpaired", "bco")
    for line, batch, step in zip(found, batches(folder), steps, strict=True):
        assert bool(batch["kl_rows"]) == needs_pairs
        assert ("kl" in line) == needs_pairs
        assert ("rewards/shift" in line) == (loss_type == "bco")
        chosen = [BETA * r for r, row in zip(step.log_ratios, batch["rows"], strict=True) if rows.labels[row]]
        assert ("sft_loss" in line) == ("rewards/chosen" in line) == bool(chosen)
        assert line.get("sft_loss", 0.0) == pytest.approx(step.sft_loss, rel=1e-5)
        if loss_type == "bco":
            assert line["rewards/shift"] == pytest.approx(BETA * step.z_ref, rel=1e-3, abs=1e-6)
        if chosen:
            assert line["rewards/chosen"] == pytest.approx(sum(chosen) / len(chosen), rel=1e-3, abs=1e-5)


WAYS = [(1, 0, 1), (2, 0, 2), (3, 1, 1), (2, 2, 1), (3, 3, 1)]  # ranks, ZeRO stage, rows of a micro-batch
QUICK = {
    ("kto", 3, 3, 1), ("apo_zero_unpaired", 2, 2, 1), ("kto_length_normalized", 2, 2, 1), ("bco", 3, 3, 1),
    ("kto_humanline", 2, 2, 1),
}  # fmt: skip


@pytest.mark.parametrize(
    ("one_rank", "world_size", "zero_stage", "micro"),
    [
        pytest.param(loss, *way, marks=[] if (loss, *way) in QUICK else pytest.mark.slow)
        for loss in LOSSES
        for way in WAYS
    ],
    indirect=["one_rank"],
)
def test_ranks_micro_batches_and_stages_change_nothing(one_rank, world_size, zero_stage, micro, tmp_path):
    # Batches of 4, 4 and 3 over 3 ranks: a rank has no desirable row, no undesirable row, or a dummy alone.
    loss_type, folder, weights = one_rank
    arguments = (tmp_path, loss_type, MIXED, ROW_WEIGHTS, zero_stage, 4, micro)
    other = run_ranks(train, world_size, tmp_path, *arguments)[0]
    assert_same_lines(lines(folder), lines(tmp_path), {*SAME, "grad_norm"})
    assert_close(weights, other)


def test_a_batch_without_desirable_rows_has_no_sft_loss(tmp_path):
    run_ranks(train, 2, tmp_path, tmp_path, "bco", [False] * 6, None, 1)
    for line in lines(tmp_path):
        assert not {"sft_loss", "rewards/chosen", "rewards/margins"} & line.keys()
        assert all(value == value for value in line.values() if isinstance(value, float))


def test_the_shift_of_bco_is_the_mean_through_the_step_before(one_rank):
    loss_type, folder, _ = one_rank
    if loss_type != "bco":
        pytest.skip("another loss")
    found = lines(folder)
    assert found[0]["rewards/shift"] == 0.0
    total = rows = 0.0
    for line, after in pairwise(found):
        n = after["consumed_samples"] - line["consumed_samples"]
        batch = line["consumed_samples"] - rows
        count = {"chosen": 0, "rejected": 0}
        for row in batches(folder)[line["step"] - 1]["rows"]:
            count["chosen" if MIXED[row] else "rejected"] += 1
        total += sum(line.get(f"rewards/{name}", 0.0) * count[name] for name in count)
        rows += batch
        assert n > 0
        assert after["rewards/shift"] == pytest.approx(total / rows, rel=1e-9, abs=1e-12)


def stopped_and_resumed(folder, loss_type, stop, zero_stage):
    trainer, _ = make_trainer(
        token_rows(MIXED, SEED, weights=ROW_WEIGHTS), zero_stage=zero_stage, batch=4, micro=2, lr=LR, beta=BETA,
        steps=STEPS, eval_rows=token_rows([True, False, True], seed=9), **settings_of(loss_type, TERMS),
    )  # fmt: skip
    args = quiet_args(folder, STEPS, load_checkpoint=True, stop_after_steps=stop, logging_steps=2, eval_steps=2)
    trainer.fit(args)
    return trainer.run, gather_weights(trainer.model.module.model, torch.float32)


@pytest.mark.parametrize("loss_type", ["bco", pytest.param("kto_humanline", marks=pytest.mark.slow)])
def test_a_resumed_run_is_bit_equal_shift_and_open_window_included(loss_type, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run, weights = run_ranks(stopped_and_resumed, 2, tmp_path, whole, loss_type, None, 2)[0]
    run_ranks(stopped_and_resumed, 2, tmp_path, cut, loss_type, 3, 2)
    run_again, again = run_ranks(stopped_and_resumed, 2, tmp_path, cut, loss_type, None, 2)[0]
    assert (run_again.log_ratio_sum, run_again.log_ratio_rows) == (run.log_ratio_sum, run.log_ratio_rows)
    assert (run.log_ratio_sum != 0.0) == (loss_type == "bco")
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    for kind in ("train", "eval"):
        for line, expected in zip(lines(cut, kind), lines(whole, kind), strict=True):
            for name in (*SAME, "rewards/accuracy"):
                assert line.get(name) == expected.get(name), name


def train_adapter(folder, zero_stage, micro):
    trainer, _ = make_trainer(
        token_rows(MIXED, SEED), zero_stage=zero_stage, batch=4, micro=micro, lr=1e-2, beta=BETA, steps=3,
        lora=LoraConfig(lora_rank=4), ref_mode="adapter", **settings_of("kto_humanline", TERMS),
    )  # fmt: skip
    trainer.fit(quiet_args(folder, 3))


def test_a_loss_by_token_takes_the_policy_with_its_adapter_off_as_reference(tmp_path):
    run_ranks(train_adapter, 1, tmp_path, tmp_path / "one", 0, 4)
    run_ranks(train_adapter, 2, tmp_path, tmp_path / "two", 3, 1)
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert one[0]["rewards/rejected"] == two[0]["rewards/rejected"] == one[0]["kl"] == 0.0
    assert abs(one[-1]["rewards/rejected"]) > 1e-4
    assert_same_lines(one, two, {*SAME, "grad_norm"})


def test_no_shift_is_known_before_the_first_step():
    assert RunState().shift is None
    assert RunState(log_ratio_sum=3.0, log_ratio_rows=4).shift == 0.75


def evaluate(loss_type, micro):
    rows = token_rows([True, False, False, True, False], seed=4, weights=[1.0, 2.0, 0.0, 0.5, 1.0])
    trainer, _ = make_trainer(
        token_rows([True, False]), batch=2, micro=micro, beta=BETA, eval_rows=rows, reference=other_llama,
        **settings_of(loss_type, TERMS),
    )  # fmt: skip
    return trainer.evaluate()["eval"]


def other_llama():
    return tiny_llama(seed=9)


@pytest.mark.parametrize(
    "loss_type", [pytest.param("kto_length_normalized", marks=pytest.mark.slow), "bco", "kto_humanline"]
)
def test_evaluation_uses_the_same_definition_on_any_number_of_ranks(loss_type, tmp_path):
    items = token_rows([True, False, False, True, False], seed=4, weights=[1.0, 2.0, 0.0, 0.5, 1.0]).items
    oracle = Oracle(
        tiny_llama(), reference=other_llama(), beta=BETA, weights=WEIGHTS, lr=0.0, loss_type=loss_type, bounds=BOUNDS,
        **TERMS,
    )  # fmt: skip
    if loss_type == "bco":  # outside of training: the set's own mean
        oracle.seen = [float(oracle._log_ratio(item, item)) for item in items]
    step = oracle.step(items, [items[i - 1] for i in range(5)])
    for world_size, micro in ((1, 5), (2, 2)):
        values = run_ranks(evaluate, world_size, tmp_path, loss_type, micro)[0]
        assert values["loss"] == pytest.approx(step.loss, rel=1e-5)
        assert values["sft_loss"] == pytest.approx(step.sft_loss, rel=1e-5)
        rejected = [BETA * r for r, item in zip(step.log_ratios, items, strict=True) if not item["label"]]
        assert values["rewards/rejected"] == pytest.approx(sum(rejected) / 3, rel=1e-4)
