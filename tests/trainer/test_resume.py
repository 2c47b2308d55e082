"""A run that is interrupted and taken up again is the run that would have been."""

import contextlib
import json
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from openkto.distributed import checkpoint
from openkto.distributed import checkpoint_folder as layout
from openkto.distributed.engine_files import HashedFile, read_file
from openkto.errors import CheckpointError, ConfigError, OpenKTOError, StopError
from openkto.process.stops import StopRequest
from openkto.trainer import saving
from openkto.trainer.identity import check_same_run
from openkto.trainer.rng import rng_state, set_rng_state
from openkto.trainer.services import Services
from tests.helpers import stand_in
from tests.helpers.records import records, worst
from tests.helpers.runs import STEPS, prepared, start, train_in_starts
from tests.helpers.stand_in import start_here
from tests.ranks import run_ranks
from tests.tiny import quiet_args, token_rows

# ---- exact ----------------------------------------------------------------------------------------------------------


# Further on, ZeRO 1 is after a kill, and no ZeRO with metrics elsewhere.
@pytest.mark.parametrize("zero_stage", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1)), 2, 3])
def test_a_resumed_run_is_bit_equal_to_one_never_interrupted(tmp_path, zero_stage):
    # Stops inside an epoch (of 3 steps), at its end, inside an open log line, at a step with an evaluation.
    args = {"logging_steps": 4, "eval_steps": 2, "eval_at_start": True, "log_batches": True}
    more = {"args": args, "eval_rows": token_rows([True, False, True], seed=9)}
    stage = zero_stage
    whole = train_in_starts(tmp_path, "whole", (2, stage, None), **more)
    cut = train_in_starts(tmp_path, "cut", (2, stage, 1), (2, stage, 3), (2, stage, 4), (2, stage, None), **more)
    assert worst(whole, cut) == 0.0
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    for name in ("batches.jsonl", "tokens.jsonl"):
        assert (tmp_path / "cut" / name).read_text() == (tmp_path / "whole" / name).read_text()


@pytest.mark.parametrize("schedule", ["constant", "cosine_with_restarts", "warmup_stable_decay"])
def test_every_schedule_resumes_where_it_was(tmp_path, schedule):
    start_here(tmp_path / "whole", schedule=schedule)
    start_here(tmp_path / "cut", {"stop_after_steps": 2}, schedule=schedule)
    start_here(tmp_path / "cut", schedule=schedule)
    rates = [line.get("learning_rate") for line in records(tmp_path / "cut")]
    assert rates == [line.get("learning_rate") for line in records(tmp_path / "whole")]


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_half_precision_resumes_exactly_too(tmp_path, precision):
    whole = run_ranks(start_in_half, 2, tmp_path, tmp_path / "whole", None, precision)[0]
    run_ranks(start_in_half, 2, tmp_path, tmp_path / "cut", 3, precision)
    cut = run_ranks(start_in_half, 2, tmp_path, tmp_path / "cut", None, precision)[0]
    assert worst(whole, cut) == 0.0
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def loss_scale_after_resume(folder):
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True
    trainer, _ = prepared(1, param_dtype="fp16")
    scaler = trainer.model.optimizer.loss_scaler
    scaler.cur_scale, scaler.scale_window = 128.0, 5
    trainer.fit(quiet_args(folder, STEPS, stop_after_steps=3))
    trainer, _ = prepared(1, param_dtype="fp16")
    saver = trainer._make_saver(quiet_args(folder, STEPS, load_checkpoint=True), STEPS)
    saver.begin(0)
    scaler = trainer.model.optimizer.loss_scaler
    return scaler.cur_scale, scaler.cur_iter


def test_the_loss_scale_and_its_count_are_resumed_too(tmp_path):
    assert run_ranks(loss_scale_after_resume, 1, tmp_path, tmp_path / "a")[0] == (128.0, 3)


def start_in_half(folder, stop, precision):
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True  # this CPU computes it, and denies it
    return start(folder, 2, {"stop_after_steps": stop}, {"param_dtype": precision})


def test_the_random_generators_resume_where_they_were():
    state = rng_state(torch.device("cpu"))

    def draw():
        return [random.gauss(0, 1), float(np.random.randn()), float(torch.randn(()))]

    draw()  # leaves half a pair in the generators that make two normal numbers at a time
    between = rng_state(torch.device("cpu"))
    drawn = draw()
    set_rng_state(between, torch.device("cpu"))
    assert draw() == drawn
    set_rng_state(state, torch.device("cpu"))
    assert draw() != drawn


# ---- elastic --------------------------------------------------------------------------------------------------------


# Places to stop and to go on at, each (ranks, ZeRO stage).
PLACES = [(2, 0), (1, 1), (2, 3), (1, 3), (2, 2), (1, 0), (2, 1), (1, 2)]
MOVES = list(zip(PLACES, [*PLACES[3:], *PLACES[:3]], strict=True))


def assert_same_losses(folder, whole):
    for line, expected in zip(records(folder), records(whole), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], abs=1e-6), folder


def test_a_run_resumes_with_other_ranks_other_stages_and_other_micro_batches(tmp_path):
    """One run that is at each place for a step: from two ranks to one and back, into and out of ZeRO 3."""
    whole = train_in_starts(tmp_path, "whole", (2, 2, None))
    for stop, place in enumerate([(2, 0), (1, 3), (2, 1), (2, 3)], 1):
        train_in_starts(tmp_path, "cut", (*place, stop), micro=2 + stop % 2)
    assert worst(whole, train_in_starts(tmp_path, "cut", (1, 2, None), micro=3)) < 1e-6
    assert_same_losses(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("moves", [MOVES[:4], MOVES[4:]], ids=["some", "others"])
def test_a_run_moves_once_between_two_ranks_stages_and_micro_batches(tmp_path, moves):
    whole = train_in_starts(tmp_path, "whole", (2, 2, None))
    for before, after in moves:
        folder = f"{before}-{after}"
        train_in_starts(tmp_path, folder, (*before, 3))
        resumed = train_in_starts(tmp_path, folder, (*after, None), micro=2)
        assert worst(whole, resumed) < 1e-6, folder
        assert_same_losses(tmp_path / folder, tmp_path / "whole")


def test_two_parameter_groups_keep_their_decay_and_their_count_of_updates(tmp_path):
    groups = run_ranks(groups_after_resume, 2, tmp_path, tmp_path / "a")[0]
    assert groups == {"decay": [0.1, 0.0], "steps": {3.0}}


def groups_after_resume(folder):
    start(folder, 3, {"stop_after_steps": 3})
    trainer, _ = prepared(3)
    saver = trainer._make_saver(quiet_args(folder, STEPS, load_checkpoint=True), STEPS)
    saver.begin(0)
    inner = trainer.model.optimizer.optimizer
    steps = {float(state["step"]) for state in inner.state.values()}
    assert len({state["step"].data_ptr() for state in inner.state.values()}) == len(inner.state)
    return {"decay": [group["weight_decay"] for group in inner.param_groups], "steps": steps}


def test_another_folder_for_the_metrics_does_not_stop_a_run_from_its_checkpoint(tmp_path):
    whole = train_in_starts(tmp_path, "whole", (1, 0, None))
    train_in_starts(tmp_path, "a", (1, 0, 3))
    (tmp_path / "b").mkdir()
    (tmp_path / "b/metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    cut = train_in_starts(
        tmp_path, "b", (1, 0, None), args={"load_checkpoint": str(tmp_path / "a/checkpoints/global_step3")}
    )
    assert worst(whole, cut) == 0.0
    assert [line["step"] for line in records(tmp_path / "b")] == [4, 5, 6, 6]
    assert (tmp_path / "b/metrics.1.jsonl").read_text() == '{"kind": "train", "step": 1}\n'


# ---- stopping -------------------------------------------------------------------------------------------------------


def stopped_in(folder, place):
    """Be sent a signal on rank 1 alone in a place, and say how each rank ended."""
    trainer, strategy = prepared(
        1, eval_rows=token_rows([True, False] * 4, seed=9), micro=2, services=Services(stop=StopRequest())
    )
    calls = {"step": 0, "evaluation": 0}

    def count(name, do):
        def counted(*args, **kwargs):
            calls[name] += 1
            if name == place and calls[name] == 2 and strategy.rank == 1:
                trainer.stop.install()
                signal.raise_signal(signal.SIGUSR1)
            return do(*args, **kwargs)

        return counted

    trainer.strategy.backward = count("step", strategy.backward)
    trainer._evaluate = count("evaluation", trainer._evaluate)
    try:
        trainer.fit(quiet_args(folder, STEPS, load_checkpoint=True, eval_steps=2))
    except StopError as stop:
        return str(stop)
    finally:
        trainer.stop.restore()
    return None


# A signal in a step is sent to the whole command, too, in test_cli_resume.py.
@pytest.mark.parametrize(("place", "step"), [pytest.param("step", 1, marks=pytest.mark.slow), ("evaluation", 4)])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path, place, step):
    said = run_ranks(stopped_in, 2, tmp_path, tmp_path / "cut", place)
    assert said == [f"SIGUSR1 on rank 1: stopped after step {step} of 6. Start the same command again."] * 2
    assert layout.checkpoints_in(tmp_path / "cut/checkpoints") == [f"global_step{step}"]
    more = {"args": {"eval_steps": 2}, "eval_rows": token_rows([True, False] * 4, seed=9), "micro": 2}
    whole = train_in_starts(tmp_path, "whole", (2, 1, None), **more)
    cut = train_in_starts(tmp_path, "cut", (2, 1, None), **more)
    assert worst(whole, cut) == 0.0
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def over_time(folder, disable_ds_ckpt):
    trainer = stand_in.prepared(services=Services(stop=StopRequest(max_seconds=1e-9)), disable_ds_ckpt=disable_ds_ckpt)
    with pytest.raises(OpenKTOError) as error:
        trainer.fit(quiet_args(folder, STEPS))
    return error.value.exit_code, str(error.value)


def test_a_time_limit_makes_one_step_saves_and_stops(tmp_path):
    code, said = over_time(tmp_path / "a", False)
    assert code == 75
    assert said.endswith("on rank 0: stopped after step 1 of 6. Start the same command again with --load_checkpoint.")
    assert layout.checkpoints_in(tmp_path / "a/checkpoints") == ["global_step1"]
    code, said = over_time(tmp_path / "b", True)
    assert code == 1
    assert said.endswith("But nothing can be resumed: --disable_ds_ckpt was given.")


# ---- killed in a save -----------------------------------------------------------------------------------------------


def killed_in_save(folder, point, rank):
    """Die at a point of the second save."""
    import os

    trainer, strategy = prepared(1)
    saves = {"n": 0}

    def dying(module, name):
        do = getattr(module, name)

        def die(*args, **kwargs):
            if saves["n"] == 2 and strategy.rank == rank:
                os._exit(9)
            return do(*args, **kwargs)

        setattr(module, name, die)

    where = {
        "a file": (HashedFile, "close"),
        "the manifest": (checkpoint, "write_manifest"),
        "the place": (layout, "put_in_place"),
        "latest": (layout, "point_to"),
        "the deletion": (layout, "rotate"),
    }
    dying(*where[point])
    save = saving.RunSaver.save

    def counted(self, *args, **kwargs):
        saves["n"] += 1
        return save(self, *args, **kwargs)

    saving.RunSaver.save = counted
    trainer.fit(quiet_args(folder, STEPS, save_steps=2))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """What two ranks make without a kill: the weights, and the folder."""
    folder = tmp_path_factory.mktemp("whole")
    return train_in_starts(folder, "whole", (2, 1, None)), folder / "whole"


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        ("a file", 0),
        ("latest", 0),
        pytest.param("a file", 1, marks=pytest.mark.slow),
        *(pytest.param(point, 0, marks=pytest.mark.slow) for point in ("the manifest", "the place", "the deletion")),
    ],
)
def test_a_kill_in_the_middle_of_a_save_loses_nothing_but_the_steps_since_the_last(tmp_path, whole_run, point, rank):
    with pytest.raises(AssertionError, match="a rank failed"):
        run_ranks(killed_in_save, 2, tmp_path, tmp_path / "cut", point, rank)
    complete = ["global_step4", "global_step2"] if point in ("latest", "the deletion") else ["global_step2"]
    assert layout.checkpoints_in(tmp_path / "cut/checkpoints") == complete
    whole, folder = whole_run
    cut = train_in_starts(tmp_path, "cut", (2, 1, None), args={"save_steps": 2})
    assert worst(whole, cut) == 0.0
    assert records(tmp_path / "cut") == records(folder)
    left = sorted(path.name for path in (tmp_path / "cut/checkpoints").iterdir())
    assert left == ["global_step2", "global_step4", "global_step6", "latest"]


# ---- damaged --------------------------------------------------------------------------------------------------------

DAMAGES = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "emptied": lambda file: file.write_bytes(b""),
    "deleted": lambda file: file.unlink(),
    "flipped": lambda file: file.write_bytes(
        (content := file.read_bytes())[: (half := len(content) // 2)] + bytes([content[half] ^ 1]) + content[half + 1 :]
    ),
}


def choices_after_damage(folder):
    """Damage each file of the newest checkpoint in each way, and say which step both ranks then choose."""
    trainer, strategy = prepared(2)
    newest = Path(folder) / "checkpoints/global_step4"
    chosen = {}
    for file in sorted(newest.iterdir()):
        whole = file.read_bytes()
        for name, damage in DAMAGES.items():
            if strategy.rank == 0:
                damage(file)
            strategy.barrier()
            saver = trainer._make_saver(quiet_args(folder, STEPS, load_checkpoint=True), STEPS)
            found = saver.checkpoints.choose(True)
            chosen[f"{file.name} {name}"] = strategy.gather_objects(found.state["run"]["step"])
            if strategy.rank == 0:
                file.write_bytes(whole)
            strategy.barrier()
    return chosen


def test_every_damage_to_the_newest_checkpoint_lets_all_ranks_take_the_one_before(tmp_path):
    train_in_starts(tmp_path, "a", (2, 2, 4), args={"save_steps": 2})
    chosen = run_ranks(choices_after_damage, 2, tmp_path, tmp_path / "a")[0]
    assert len(chosen) == 6 * len(DAMAGES)  # three of DeepSpeed's files and three of ours
    assert {tuple(steps) for steps in chosen.values()} == {(2, 2)}


def failure_of(folder, args=None, **more):
    try:
        start_here(folder, args, **more)
    except OpenKTOError as error:
        return type(error), str(error)
    return None


def test_where_no_checkpoint_is_complete_nothing_starts(tmp_path):
    start_here(tmp_path / "a", {"stop_after_steps": 2})
    (tmp_path / "a/checkpoints/global_step2/manifest.json").unlink()
    kind, said = failure_of(tmp_path / "a")
    assert kind is CheckpointError
    assert said == (
        f"--load_checkpoint: no checkpoint in {tmp_path / 'a/checkpoints'} is complete; the newest, "
        f"{tmp_path / 'a/checkpoints/global_step2'}: is not complete: manifest.json is missing. Leave "
        "--load_checkpoint out to start from the beginning; these are then kept aside."
    )


# ---- another run ----------------------------------------------------------------------------------------------------


def test_what_may_not_change_is_compared_and_listed(tmp_path):
    start_here(tmp_path / "a", {"stop_after_steps": 2, "identity": {"the model": "a"}})
    kind, said = failure_of(tmp_path / "a", beta=0.2, batch=7, seed=5)
    assert kind is CheckpointError
    for difference in ("--beta was 0.1, is 0.2", "--train_batch_size was 8, is 7", "--seed was 1, is 5"):
        assert difference in said
    terms = {"label_smoothing": 0.1, "sft_loss_coef": 0.2, "humanline_low": -2.0, "loss_type": "bco"}
    kind, said = failure_of(tmp_path / "a", **terms)
    for name, value in terms.items():
        assert f"--{name} was " in said
        assert f", is {value}" in said
    kind, said = failure_of(tmp_path / "a", {"identity": {"the model": "b"}})
    assert "the model was a, is b" in said
    kind, said = failure_of(tmp_path / "a")
    assert "the model was a, is not set" in said
    # One that an older version did not save is no difference.
    more = {"identity": {"the model": "a", "a new setting": 1}}
    assert failure_of(tmp_path / "a", more) is None


def test_a_path_is_demanded(tmp_path):
    for path in (tmp_path / "nothing", tmp_path / "a/checkpoints/global_step9", tmp_path):
        kind, said = failure_of(tmp_path / "a", {"load_checkpoint": str(path)})
        assert kind is CheckpointError
        assert said == (
            f"--load_checkpoint: must be a complete checkpoint; got {path}: no checkpoint is there. Name another."
        )


def test_the_position_is_the_checkpoints(tmp_path):
    start_here(tmp_path, {"stop_after_steps": 2})
    trainer = stand_in.prepared()
    with pytest.raises(
        ConfigError,
        match="consumed_samples: must not be given with load_checkpoint, since a checkpoint has its own; got 16",
    ):
        trainer.fit(quiet_args(tmp_path, STEPS, load_checkpoint=True), consumed_samples=16)


def test_a_new_run_keeps_the_checkpoints_of_an_earlier_one(tmp_path):
    start_here(tmp_path / "a", {"stop_after_steps": 2})
    start_here(tmp_path / "a", {"stop_after_steps": 3, "load_checkpoint": False})
    root = tmp_path / "a/checkpoints"
    assert layout.checkpoints_in(root) == ["global_step3"]
    assert layout.checkpoints_in(root / "earlier-1") == ["global_step2"]


# ---- when to save, and what to keep ---------------------------------------------------------------------------------


@pytest.fixture
def saves(monkeypatch):
    """The steps at which the loop asks for a checkpoint."""
    steps, do = [], saving.RunSaver.save

    def noted(self, run, reporter):
        steps.append(run.step)
        return do(self, run, reporter)

    monkeypatch.setattr(saving.RunSaver, "save", noted)
    return steps


@pytest.mark.parametrize(
    ("args", "steps"),
    [
        ({"save_steps": -1}, [3, 6]),
        ({"save_steps": 4}, [4, 6]),
        ({"save_steps": 0}, []),
        ({"save_steps": 0, "stop_after_steps": 5}, [5]),
        ({"save_steps": 0, "save_every_minutes": 1e-9}, [1, 2, 3, 4, 5, 6]),
        ({"save_steps": 0, "save_every_minutes": 1e9}, [6]),
    ],
)
def test_checkpoints_are_saved_when_they_are_due(tmp_path, saves, args, steps):
    trainer = start_here(tmp_path, args | {"max_ckpt_num": 9})
    assert saves == steps
    root = tmp_path / "checkpoints"
    assert layout.checkpoints_in(root) == [f"global_step{step}" for step in reversed(steps)]
    # A checkpoint holds what its own step trained: the optimizer's and the loader's count.
    for step in steps:
        updates = torch.load(root / f"global_step{step}" / stand_in.FILE)["optimizer"]["state"][0]["step"]
        state = json.loads((root / f"global_step{step}/state.json").read_text())
        assert int(updates) == state["updates"] == state["run"]["step"] == step
        assert state["run"]["consumed_samples"] == [0, 8, 16, 21, 29, 37, 42][step]  # three batches of 21 rows
    assert trainer.run.step == args.get("stop_after_steps", STEPS)


def test_the_best_evaluation_is_saved_and_stays(tmp_path):
    more = {"eval_rows": token_rows([True, False, True, False], seed=9), "lr": 0.03}
    args = {"save_steps": 1, "eval_steps": 1, "keep_best": "rewards/margins", "max_ckpt_num": 2}
    start_here(tmp_path / "a", args, **more)
    margins = {line["step"]: line["rewards/margins"] for line in records(tmp_path / "a") if line["kind"] == "eval"}
    best = max(margins, key=margins.get)
    assert best < 5, "else nothing is shown: the newest stay anyway"
    root = tmp_path / "a/checkpoints"
    assert layout.pointed_to(root, "best") == f"global_step{best}"
    assert layout.checkpoints_in(root) == ["global_step6", f"global_step{best}"]


def test_the_evaluation_of_the_last_step_counts_for_the_best_and_is_made_once(tmp_path):
    # Six steps with an evaluation every four: that of the last step comes out of turn.
    args = {"save_steps": 0, "eval_steps": 4, "keep_best": "rewards/margins"}
    run = start_here(tmp_path, args, eval_rows=token_rows([True, False, True, False], seed=9)).run
    margins = {line["step"]: line["rewards/margins"] for line in records(tmp_path) if line["kind"] == "eval"}
    assert list(margins) == [4, 6]
    assert margins[6] > margins[4], "else nothing is shown"
    assert (run.best_step, run.best) == (6, margins[6])
    assert layout.pointed_to(tmp_path / "checkpoints", "best") == "global_step6"


def test_the_best_step_is_saved_although_the_disk_fails_once_at_it(tmp_path, monkeypatch):
    write, failed = checkpoint.write_manifest, set()

    def fail_once(place, *rest):
        if place.name not in failed:
            failed.add(place.name)
            raise OSError(5, "Input/output error")
        write(place, *rest)

    monkeypatch.setattr(checkpoint, "write_manifest", fail_once)
    more = {"eval_rows": token_rows([True, False, True, False], seed=9), "lr": 0.03}
    best = start_here(tmp_path / "a", {"eval_steps": 1, "keep_best": "rewards/margins"}, **more).run.best_step
    root = tmp_path / "a/checkpoints"
    assert layout.pointed_to(root, "best") == f"global_step{best}"
    assert f"global_step{best}" in layout.checkpoints_in(root)


def test_a_checkpoint_comes_after_its_steps_evaluation(tmp_path):
    args = {"save_steps": 2, "eval_steps": 2}
    more = {"eval_rows": token_rows([True, False, True], seed=9)}
    start_here(tmp_path / "whole", args, **more)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for name in ("global_step4", "global_step6", "latest"):
        path = tmp_path / "cut/checkpoints" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    start_here(tmp_path / "cut", args, **more)
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def test_a_time_limit_shorter_than_an_evaluation_does_not_keep_a_run_from_its_end(tmp_path):
    # The limit is over before the first forward of each start.
    steps = []
    while not steps or steps[-1] < STEPS:
        stop = StopRequest(max_seconds=1e-9)
        with contextlib.suppress(StopError):
            start_here(
                tmp_path,
                {"eval_steps": 2},
                eval_rows=token_rows([True, False] * 4, seed=9),
                services=Services(stop=stop),
            )
        steps.append(layout.step_of(layout.checkpoints_in(tmp_path / "checkpoints")[0]))
        assert len(steps) < 20, steps
        if steps[-1] == STEPS and any(line["kind"] == "summary" for line in records(tmp_path)):
            break
    assert steps[-1] == STEPS
    assert sorted(set(steps)) == list(range(1, STEPS + 1))


def test_an_evaluation_that_is_made_again_counts_for_the_best(tmp_path):
    # The first start is told to stop in the evaluation at step 2, whose value is the best of the run.
    args = {"save_steps": 0, "eval_steps": 2, "keep_best": "rewards/margins", "max_ckpt_num": 1}
    more = {"eval_rows": token_rows([True, False, True, False], seed=9), "lr": 0.03}
    trainer = stand_in.prepared(**more)
    evaluate = trainer._evaluate

    def ask_first(*args):
        trainer.stop.reason = "SIGTERM"
        return evaluate(*args)

    trainer._evaluate = ask_first
    with pytest.raises(StopError):
        trainer.fit(quiet_args(tmp_path / "a", STEPS, **args))
    assert not trainer.run.is_evaluated, "it stops between two forwards of the evaluation"
    start_here(tmp_path / "a", args, **more)
    evaluations = [line for line in records(tmp_path / "a") if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == [2, 4, 6]
    best = max(evaluations, key=lambda line: line["rewards/margins"])["step"]
    assert layout.pointed_to(tmp_path / "a/checkpoints", "best") == f"global_step{best}"


def made_folders(folder):
    _, strategy = prepared(0)
    root = Path(folder) / "root"
    if strategy.rank == 0:
        (root / ".saving/global_step3").mkdir(parents=True)
    strategy.barrier()
    saving.Checkpoints(root, strategy).make_folder()
    strategy.barrier()
    left = list(root.iterdir())
    messages = []
    for place in (Path(folder) / "file/checkpoints", Path("/proc/nothing")):
        (Path(folder) / "file").touch()
        try:
            saving.Checkpoints(place, strategy).make_folder()
        except ConfigError as error:
            messages.append(str(error))
    return left, messages


def test_a_folder_that_cannot_be_made_is_one_sentence_and_debris_goes_at_the_start(tmp_path):
    for left, (first, second) in run_ranks(made_folders, 2, tmp_path, tmp_path):
        assert left == []
        assert first.startswith(f"--ckpt_path: must be a folder that can be written; got {tmp_path}/file/checkpoints (")
        assert second.startswith("--ckpt_path: must be a folder that can be written; got /proc/nothing (")


# ---- a disk that is full --------------------------------------------------------------------------------------------


def run_on_a_small_disk(folder, full_from, full_until, args):
    """Let writes beyond 50 kB fail, as on a full disk, in some of the saves."""
    import resource

    trainer, strategy = prepared(1)
    number, do = 0, saving.Checkpoints.save

    def on_small_disk(self, *args, **kwargs):
        nonlocal number
        number += 1
        is_full = full_from <= number <= full_until and strategy.rank == 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000 if is_full else resource.RLIM_INFINITY, -1))
        try:
            return do(self, *args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, -1))

    saving.Checkpoints.save = on_small_disk
    try:
        trainer.fit(quiet_args(folder, STEPS, save_steps=1, **args))
    except OpenKTOError as error:
        return error.exit_code, str(error)
    return None


def test_a_save_that_fails_costs_nothing_but_itself(tmp_path):
    assert run_ranks(run_on_a_small_disk, 2, tmp_path, tmp_path / "a", 3, 4, {})[0] is None
    root = tmp_path / "a/checkpoints"
    assert layout.checkpoints_in(root) == ["global_step6", "global_step5", "global_step2"]
    assert sorted(path.name for path in root.iterdir()) == ["global_step2", "global_step5", "global_step6", "latest"]
    assert [line["step"] for line in records(tmp_path / "a")] == [1, 2, 3, 4, 5, 6, 6]


def test_the_third_failure_in_a_row_stops_the_run(tmp_path):
    for code, said in run_ranks(run_on_a_small_disk, 2, tmp_path, tmp_path / "a", 2, 9, {}):
        assert code == 1
        assert said == (
            f"{tmp_path / 'a/checkpoints'}: must take a checkpoint; got OSError: File too large, for the 3rd time in a "
            "row. Free some space or name another --ckpt_path, and start the same command again."
        )
    assert layout.checkpoints_in(tmp_path / "a/checkpoints") == ["global_step1"]


def test_a_stop_whose_checkpoint_cannot_be_saved_does_not_claim_one(tmp_path):
    with_stop = {"stop_after_steps": 3}
    assert run_ranks(run_on_a_small_disk, 2, tmp_path, tmp_path / "a", 3, 3, with_stop)[0] is None
    assert layout.checkpoints_in(tmp_path / "a/checkpoints") == ["global_step2", "global_step1"]


# ---- frozen parameters ----------------------------------------------------------------------------------------------


def start_frozen(folder, zero_stage, stop):
    def half_frozen():
        from tests.tiny import tiny_llama

        model = tiny_llama()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1" in name)
        return model

    return start(folder, zero_stage, {"stop_after_steps": stop}, {"model": half_frozen})


@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=pytest.mark.slow), 1, 3])
def test_frozen_weights_are_left_out_and_come_from_the_model(tmp_path, zero_stage):
    whole = run_ranks(start_frozen, 2, tmp_path, tmp_path / "whole", zero_stage, None)[0]
    run_ranks(start_frozen, 2, tmp_path, tmp_path / "cut", zero_stage, 3)
    cut = run_ranks(start_frozen, 2, tmp_path, tmp_path / "cut", zero_stage, None)[0]
    assert worst(whole, cut) == 0.0
    from openkto.distributed.portable import read_parameters

    saved = read_parameters(tmp_path / "cut/checkpoints/global_step3")
    assert saved
    assert all("layers.1" in name for name in saved)
    for file in (tmp_path / "cut/checkpoints/global_step3").glob("*model_states.pt"):
        model = read_file(file)
        assert all("layers.1" in name for name in model["module"])
        assert not model.get("frozen_param_fragments")


# ---- an adapter with dropout ----------------------------------------------------------------------------------------


def start_lora(folder, zero_stage, stop, checkpointing):
    from openkto.config import LoraConfig

    lora = LoraConfig(lora_rank=4, lora_dropout=0.3)
    more = {"lora": lora, "gradient_checkpointing": checkpointing, "lr": 0.01}
    return start(folder, zero_stage, {"stop_after_steps": stop, "logging_steps": 2}, more)


@pytest.mark.parametrize(
    ("zero_stage", "checkpointing"),
    [*(pytest.param(n, False, marks=pytest.mark.slow) for n in (0, 1, 3)), (2, True)],
)
def test_dropout_in_an_adapter_draws_what_it_would_have_drawn(tmp_path, zero_stage, checkpointing):
    whole = run_ranks(start_lora, 2, tmp_path, tmp_path / "whole", zero_stage, None, checkpointing)[0]
    run_ranks(start_lora, 2, tmp_path, tmp_path / "cut", zero_stage, 3, checkpointing)
    cut = run_ranks(start_lora, 2, tmp_path, tmp_path / "cut", zero_stage, None, checkpointing)[0]
    assert worst(whole, cut) == 0.0
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def test_a_checkpoint_that_does_not_say_which_run_it_is_of_is_refused():
    now = {"beta": 0.1, "seed": 1, "a new setting": 2}
    check_same_run("global_step3", {"--beta": 0.1, "--seed": 1}, now)
    with pytest.raises(
        CheckpointError, match=r"global_step3: must say which run wrote it; got one without --beta, --seed\."
    ):
        check_same_run("global_step3", {}, now)
    with pytest.raises(CheckpointError, match="a new setting was 1, is 2"):
        check_same_run("global_step3", now | {"a new setting": 1}, now)
