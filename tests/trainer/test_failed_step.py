"""A step that gives NaN leaves what it takes to make it again."""

import json
import math

import numpy as np
import pytest
import torch

from openkto.distributed.checkpoint_folder import pointed_to
from openkto.distributed.gather import gather_weights
from openkto.errors import TrainingError
from tests.helpers.long_pairs import no_position_past, seed_that_pairs
from tests.helpers.records import batches, lines
from tests.ranks import run_ranks
from tests.tiny import TokenRowList, make_trainer, quiet_args, token_rows

LENGTHS = [(8, 3), (3, 8)]  # of rows 1 and 2, by prompt and completion


def train_on_a_pair_that_is_too_long(folder):
    items = token_rows([True, False, True, False], longest=4).items
    for row, (prompt, completion) in enumerate(LENGTHS, 1):
        items[row] |= {"prompt_ids": [5] * prompt, "completion_ids": [6 + row] * completion}
        items[row]["completion_mask"] = [True] * completion
    seed = seed_that_pairs(1, 2, rows=4)
    rows = TokenRowList(items, np.arange(4))
    trainer, _ = make_trainer(rows, model=lambda: no_position_past(12), batch=4, micro=1, seed=seed)
    with pytest.raises(TrainingError):
        trainer.fit(quiet_args(folder, 1, log_batches=True))
    ids = torch.tensor([items[1]["prompt_ids"] + items[1]["completion_ids"]])
    tokens = no_position_past(12).double().eval()(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
    return float(tokens[LENGTHS[0][0] - 1 :].sum())


def test_a_step_that_fails_leaves_its_rows_lengths_and_terms(tmp_path):
    log_prob = run_ranks(train_on_a_pair_that_is_too_long, 2, tmp_path, tmp_path / "a")[0]
    left = json.loads((tmp_path / "a/failed_step1.json").read_text())
    assert (left["step"], left["updates_before"], left["dtype"]) == (1, 0, "torch.float32")
    assert (left["z_ref"], left["mismatched_mean"]) == ("nan", "nan")
    assert sorted(row["row"] for row in left["rows"]) == [0, 1, 2, 3]
    (row,) = (row for row in left["rows"] if row["row"] == 1)
    assert (row["prompt_tokens"], row["completion_tokens"], row["scored_tokens"]) == (8, 3, 3)
    assert (row["is_desirable"], row["weight"], row["log_ratio"]) == (0, 1, 0)
    assert row["log_prob"] == pytest.approx(log_prob, rel=1e-5)
    bad = [pair for pair in left["mismatched_pairs"] if not math.isfinite(float(pair["log_ratio"]))]
    assert bad == [{"prompt_of": 1, "completion_of": 2, "log_ratio": "nan"}]
    (line,) = batches(tmp_path / "a")
    assert line["step"] == 1
    assert sorted(line["rows"]) == [0, 1, 2, 3]


# ---- the state before it --------------------------------------------------------------------------------------------

STEPS, FAILED = 4, 3


def train(folder, zero_stage, fails_in=None, **more):
    """Train a model whose forwards draw a number; return the weights, None of a step that failed, and the numbers."""
    rows = token_rows([True, False] * 8)
    settings = {"batch": 4, "micro": 2, "lr": 3e-3, "steps": STEPS, "schedule": "cosine"}
    trainer, _ = make_trainer(rows, zero_stage=zero_stage, **settings)
    draws = []

    def last_norm(module, inputs, output):
        if torch.is_grad_enabled():
            draws.append((trainer.run.step, float(torch.rand(()))))
        if trainer.run.step == FAILED and torch.is_grad_enabled():
            if fails_in == "gradient":
                output.register_hook(lambda gradient: gradient * math.nan)
            elif fails_in == "forward":
                return output * math.nan
        return output

    trainer.model.module.model.model.norm.register_forward_hook(last_norm)
    args = quiet_args(folder, STEPS, logging_steps=3, **more)
    if fails_in is not None:
        with pytest.raises(TrainingError, match=f"step {FAILED}:"):
            trainer.fit(args)
        return None, draws
    trainer.fit(args)
    return gather_weights(trainer.model.module, torch.float32), draws


def fail_and_go_on(folder, zero_stage, fails_in):
    """Fail, replay what failed from the state before it, and go on from there as if nothing had failed."""
    whole, drawn = train(folder / "whole", zero_stage)
    out = folder / fails_in
    train(out, zero_stage, fails_in, save_failed_step=True, save_steps=2, max_ckpt_num=1)
    before = str(out / f"checkpoints/before_failed_step{FAILED}")
    _, again = train(folder / "replay", zero_stage, fails_in, load_checkpoint=before)
    assert again == [draw for draw in drawn if draw[0] == FAILED]
    weights, rest = train(folder / "rest", zero_stage, load_checkpoint=before)
    assert rest == [draw for draw in drawn if draw[0] >= FAILED]
    return all(torch.equal(weights[name], whole[name]) for name in whole), sorted(
        path.name for path in (out / "checkpoints").iterdir()
    )


@pytest.mark.parametrize(
    ("zero_stage", "fails_in"),
    [*(pytest.param(n, "gradient", marks=pytest.mark.slow) for n in (0, 2)), (3, "forward")],
)
def test_the_state_before_a_step_that_failed_makes_it_again(tmp_path, zero_stage, fails_in):
    is_equal, names = run_ranks(fail_and_go_on, 2, tmp_path, tmp_path, zero_stage, fails_in)[0]
    assert is_equal
    # It is neither counted nor taken for the newest.
    assert names == [f"before_failed_step{FAILED}", "global_step2", "latest"]
    rest, whole = ([(line["step"], line["loss"]) for line in lines(tmp_path / name)] for name in ("rest", "whole"))
    assert rest == whole
    state = json.loads((tmp_path / fails_in / f"checkpoints/before_failed_step{FAILED}/state.json").read_text())
    assert (state["run"]["step"], state["updates"]) == (FAILED - 1, FAILED - 1)
    assert pointed_to(tmp_path / fails_in / "checkpoints", "latest") == "global_step2"
