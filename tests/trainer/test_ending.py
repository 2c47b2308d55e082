"""A run ends early when the metric that it follows stays behind its best, and can leave the best step's model."""

from pathlib import Path

import pytest
import torch

from openkto.config import LoraConfig
from openkto.distributed import checkpoint_folder as layout
from openkto.distributed.gather import gather_weights
from openkto.errors import CheckpointError, StopError
from openkto.trainer.ending import Ending, load_best
from openkto.trainer.run_state import RunState
from tests.helpers import stand_in
from tests.helpers.records import lines, records, same
from tests.helpers.runs import STEPS, prepared
from tests.helpers.stand_in import start_here
from tests.ranks import run_ranks
from tests.tiny import quiet_args, token_rows

METRIC = "rewards/margins"
ARGS = {"save_steps": 0, "eval_steps": 1, "keep_best": METRIC, "logging_steps": 4, "max_ckpt_num": 1}
MORE = {"eval_rows": token_rows([True, False, True, False], seed=9), "lr": 0.03}


# ---- the rule -------------------------------------------------------------------------------------------------------


def ended_at(values, patience, metric="rewards/auc", total=None):
    """Return the step at which a run with an evaluation at each step ends, and its best step."""
    ending, run = Ending(total or len(values), keep_best=metric, patience=patience), RunState()
    while not ending.is_reached(run):
        run.step += 1
        ending.note(run, {"first": {metric: values[run.step - 1]}, "second": {metric: -run.step}})
    return run.step, run.best_step, ending.reason(run)


def test_patience_counts_evaluations_in_a_row_that_are_not_better():
    values = [0.5, 0.7, 0.6, 0.7, 0.8, 0.8, 0.1, 0.9]
    why = "early stop: rewards/auc was not better than {} of step {} in {} evaluations in a row"
    assert ended_at(values, 1) == (3, 2, why.format(0.7, 2, 1))
    assert ended_at(values, 2) == (4, 2, why.format(0.7, 2, 2))
    assert ended_at(values, 3) == (8, 8, "last step")
    assert ended_at(values, None) == (8, 8, "last step")
    assert ended_at([0.7, 0.6], 1) == (2, 1, "last step"), "its last step is its last step"


def test_a_loss_is_better_when_it_is_lower():
    assert ended_at([0.5, 0.4, 0.45, 0.3], 1, "loss")[:2] == (3, 2)


# ---- in a run -------------------------------------------------------------------------------------------------------


def test_a_run_ends_where_its_evaluations_say_whenever_it_is_interrupted(tmp_path):
    start_here(tmp_path / "long", ARGS, **MORE)
    values = [line[METRIC] for line in lines(tmp_path / "long", "eval")]
    end, best, why = ended_at(values, 2, METRIC)
    assert end < STEPS, "else nothing is shown"
    args = ARGS | {"early_stop_patience": 2}
    whole = start_here(tmp_path / "whole", args, **MORE)
    assert [line["step"] for line in lines(tmp_path / "whole", "eval")] == list(range(1, end + 1))
    (summary,) = lines(tmp_path / "whole", "summary")
    assert (summary["step"], summary["ended"]) == (end, why)
    root = tmp_path / "whole/checkpoints"
    assert {layout.pointed_to(root, "latest"), layout.pointed_to(root, "best")} == {
        f"global_step{end}",
        f"global_step{best}",
    }
    for stop in (1, end, None):
        cut = start_here(tmp_path / "cut", args | {"stop_after_steps": stop}, **MORE)
    assert same(whole.model.state_dict(), cut.model.state_dict())
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def test_the_evaluation_that_ends_a_run_counts_when_it_is_made_again(tmp_path):
    args = ARGS | {"early_stop_patience": 2}
    end = start_here(tmp_path / "whole", args, **MORE).run.step
    assert end < STEPS, "else nothing is shown"
    trainer = stand_in.prepared(**MORE)
    evaluate = trainer._evaluate

    def ask_at_end(run, between):
        if run.step == end:
            trainer.stop.reason = "SIGTERM"
        return evaluate(run, between)

    trainer._evaluate = ask_at_end
    with pytest.raises(StopError):
        trainer.fit(quiet_args(tmp_path / "cut", STEPS, **args))
    assert not trainer.run.is_evaluated
    assert start_here(tmp_path / "cut", args, **MORE).run.step == end
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


# ---- the best step's model ------------------------------------------------------------------------------------------


def trained(folder: Path, zero_stage: int, stop: int | None, more: dict) -> tuple[dict, dict, int]:
    """Train; return the weights, whole on rank 0, of the last step, those of the best one, and which that was."""
    trainer, _ = prepared(zero_stage, schedule="constant", **MORE, **more)
    args = quiet_args(folder, STEPS, stop_after_steps=stop, **ARGS | {"keep_best": "rewards/auc"})
    trainer.fit(args)
    actor = trainer.model.module
    last = gather_weights(actor.model, torch.float32, trainable_only=actor.has_adapter)
    load_best(trainer._make_saver(args, STEPS).checkpoints, trainer.model, trainer.run, "rewards/auc")
    best = gather_weights(actor.model, torch.float32, trainable_only=actor.has_adapter)
    return last, best, trainer.run.best_step


@pytest.mark.parametrize(
    ("zero_stage", "world_size", "lora"),
    [
        (0, 1, True),
        (3, 2, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 2, False), (2, 2, True), (3, 2, True)]),
    ],
)
def test_the_model_at_the_end_is_the_best_steps(tmp_path, zero_stage, world_size, lora):
    more = {"lora": LoraConfig(lora_rank=2), "ref_mode": "adapter"} if lora else {}
    last, got, best = run_ranks(trained, world_size, tmp_path, tmp_path / "whole", zero_stage, None, more)[0]
    assert best < STEPS
    assert not same(got, last), "else nothing is shown"
    expected, *_ = run_ranks(trained, world_size, tmp_path, tmp_path / "short", zero_stage, best, more)[0]
    assert same(got, expected)


def test_a_best_checkpoint_that_was_damaged_is_an_error_that_says_where_the_last_model_is(tmp_path):
    trainer = start_here(tmp_path, ARGS, **MORE)
    root, best = tmp_path / "checkpoints", trainer.run.best_step
    assert best < STEPS, "else the model is there"
    (root / layout.name_of(best) / "manifest.json").unlink()
    checkpoints = trainer._make_saver(quiet_args(tmp_path, STEPS, **ARGS), STEPS).checkpoints
    with pytest.raises(CheckpointError) as raised:
        load_best(checkpoints, trainer.model, trainer.run, METRIC)
    message = str(raised.value)
    assert message.startswith("--load_best_at_end: the best step's checkpoint must be there;")
    assert f"checkpoints/global_step{STEPS}: openkto convert_checkpoint makes a model of it." in message
