"""The train command killed, stopped and started again, as a user and a cluster do it."""

import json
import os
import signal

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from openkto.commands import train
from openkto.distributed.checkpoint_folder import pointed_to
from openkto.distributed.portable import read_masters
from openkto.process.run_lock import RunLocks
from tests.helpers.commands import flags, run_to_status
from tests.helpers.records import batches, lines, numbers, same, weights
from tests.helpers.starts import Start, steps_recorded
from tests.ranks import run_ranks


def with_path(argv, folder, *more):
    return [
        *argv[: argv.index("--save_path")],
        "--save_path",
        str(folder),
        *argv[argv.index("--save_path") + 2 :],
        *more,
    ]


NINE_STEPS = ["--train_batch_size", "8", "--max_epochs", "3"]


@pytest.fixture
def command(place):
    """The flags of a run of four steps, two an epoch, which is too few for a plot: it would take as long as the run."""
    argv = flags(place, "--max_epochs", "2", "--zero_stage", "2", "--load_checkpoint", "--log_batches")
    argv += ["--train_batch_size", "10"]
    argv[argv.index("--use_tensorboard") : argv.index("--use_tensorboard") + 2] = []
    return argv


def test_a_stopped_run_resumes_and_a_finished_one_says_so(place, command):
    whole, cut = place / "whole", place / "cut"
    run_ranks(train.main, 2, place, with_path(command, whole))
    for stop in ("1", "3"):
        run_ranks(train.main, 2, place, with_path(command, cut, "--stop_after_steps", stop))
    run_ranks(train.main, 2, place, with_path(command, cut))
    assert same(weights(whole), weights(cut))
    for kind in ("train", "eval", "summary"):
        assert [numbers(line) for line in lines(cut, kind)] == [numbers(line) for line in lines(whole, kind)]
    assert (cut / "batches.jsonl").read_text() == (whole / "batches.jsonl").read_text()
    assert len({line["run_id"] for line in lines(cut, "run")}) == 1

    before = {path: path.stat().st_mtime_ns for path in cut.rglob("*") if path.is_file()}
    (code, said), _ = run_ranks(run_to_status, 2, place, with_path(command, cut))
    assert (code, said.splitlines()[-1]) == (
        0, f"nothing is left to do: 4 of 4 steps are done, and the model is in {cut}"
    )  # fmt: skip
    assert {path: path.stat().st_mtime_ns for path in cut.rglob("*") if path.is_file()} == before
    # The model was lost, cut or never written: it is written again.
    (cut / "model.safetensors").write_bytes(bytes((cut / "model.safetensors").stat().st_size))
    (code, said), _ = run_ranks(run_to_status, 2, place, with_path(command, cut))
    assert "model.safetensors is cut or damaged; the model is made again from" in said
    assert same(weights(whole), weights(cut))
    # Other settings are refused as they are before the end.
    ((code, said),) = run_ranks(run_to_status, 1, place, with_path(command, cut, "--beta", "0.3", "--max_steps", "8"))
    assert code == 1
    assert "--beta was 0.1, is 0.3" in said
    assert "the number of steps (--max_steps, --max_epochs) was 4, is 8" in said


def test_a_second_run_does_not_replace_a_first_ones_model_unless_it_is_asked_to(place, command):
    out, argv = place / "out", [*command, "--max_steps", "1"]
    argv.remove("--load_checkpoint")
    run_ranks(train.main, 1, place, argv)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    ((code, said),) = run_ranks(run_to_status, 1, place, [*argv, "--lora_rank", "4"])
    assert code == 2
    assert said.splitlines()[-1] == (
        f"error: --save_path: must not hold another run; got {out} with a model and the checkpoint "
        f"{out}/checkpoints/global_step1. Name another folder, or pass --load_checkpoint to resume the run that left "
        "it, or --overwrite to replace the model and keep the rest under a number."
    )
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before

    run_ranks(train.main, 1, place, [*argv, "--lora_rank", "4", "--overwrite"])
    assert (out / "adapter_config.json").exists()
    assert not (out / "config.json").exists()
    assert (out / "metrics.1.jsonl").exists()
    assert (out / "checkpoints/earlier-1/global_step1").is_dir()
    run_ranks(train.main, 1, place, [*argv, "--overwrite"])
    assert (out / "config.json").exists()
    assert not list(out.glob("adapter*"))


def test_the_run_file_of_a_stopped_run_makes_the_steps_that_are_left(place, command):
    argv = [*command, "--stop_after_steps", "3", "--max_time", "1:00:00:00"]
    run_ranks(train.main, 1, place, argv)
    ((_, said),) = run_ranks(run_to_status, 1, place, argv)
    assert "--stop_after_steps 3: is reached, 3 of 4 steps are done, and none will be made. Leave it out" in said
    run_ranks(train.main, 1, place, ["--config", f"{place}/out/run.yaml", "--load_checkpoint"])
    assert [line["step"] for line in lines(place / "out", "train")] == list(range(1, 5))
    assert not list((place / "out").glob("run.*.yaml"))


def test_a_run_that_resumed_from_a_path_resumes_from_where_it_is_now(place, command):
    a, b = place / "a", place / "b"
    shared = ["--use_tensorboard", f"{place}/events", "--save_steps", "2"]
    run_ranks(train.main, 1, place, with_path(command, a, *shared, "--stop_after_steps", "2"))
    elsewhere = [*with_path(command, b, *shared), "--load_checkpoint", f"{a}/checkpoints/global_step2"]
    elsewhere.remove("--load_checkpoint")
    run_ranks(train.main, 1, place, [*elsewhere, "--stop_after_steps", "3"])
    ((code, said),) = run_ranks(run_to_status, 1, place, elsewhere)
    assert code == 0
    assert f"resumed from {b}/checkpoints/global_step3, which continues {a}/checkpoints/global_step2: 3 of 4" in said
    assert [line["step"] for line in lines(b, "train")] == [3, 4]
    assert [line["step"] for line in batches(b)] == [3, 4]
    events = EventAccumulator(f"{place}/events")
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 5))


def test_a_run_that_ends_early_leaves_its_best_model_and_is_done(place, command):
    more = ["--learning_rate", "0.03", "--eval_steps", "1", "--keep_best", "rewards/rejected"]
    argv = [word for word in command if word not in ("--learning_rate", "1e-3")]
    argv += [*NINE_STEPS, *more, "--early_stop_patience", "1", "--load_best_at_end"]
    ((code, said),) = run_ranks(run_to_status, 1, place, argv)
    assert code == 0, said
    (summary,) = lines(place / "out", "summary")
    end, reason = summary["step"], summary["ended"]
    assert end < 9
    assert reason.startswith("early stop: rewards/rejected was not better than ")
    assert f"ended at step {end}: {reason}" in said
    # The checkpoint's weights, as `read_masters` reads them, are the model's.
    best = dict(read_masters(place / "out/checkpoints" / pointed_to(place / "out/checkpoints", "best")))
    for name, tensor in weights(place / "out").items():
        assert torch.equal(tensor.view(-1), best[f"model.{name}"]), name
    before = {path: path.stat().st_mtime_ns for path in (place / "out").rglob("*") if path.is_file()}
    ((code, said),) = run_ranks(run_to_status, 1, place, argv)
    assert (code, said.splitlines()[-1]) == (
        0, f"nothing is left to do: {end} of 9 steps are done ({reason}), and the model is in {place}/out"
    )  # fmt: skip
    assert {path: path.stat().st_mtime_ns for path in (place / "out").rglob("*") if path.is_file()} == before
    # What decides the end is part of what the run is.
    identity = json.loads((place / f"out/checkpoints/global_step{end}/state.json").read_text())["identity"]
    decided = {name: identity[name] for name in ("early_stop_patience", "load_best_at_end", "keep_best", "eval_steps")}
    assert decided == {
        "early_stop_patience": 1, "load_best_at_end": True, "keep_best": "rewards/rejected", "eval_steps": 1
    }  # fmt: skip
    held_out = place / "eval.jsonl"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:-1]))
    ((code, said),) = run_ranks(run_to_status, 1, place, argv)
    assert code == 1
    assert "the first evaluation set's rows (fingerprint) was " in said


def test_where_no_checkpoint_is_found_the_folder_is_named(place, command):
    argv = [*command, "--ckpt_path", f"{place}/mistyped", "--max_steps", "1"]
    ((_, said),) = run_ranks(run_to_status, 1, place, argv)
    assert f"--load_checkpoint: no checkpoint in {place}/mistyped yet; the run starts from the beginning" in said


def test_tensorboard_has_each_step_once_with_the_time_of_its_first_writing(place, command):
    out, every_three = place / "out", ["--logging_steps", "3", "--eval_steps", "3"]
    # The last line of each of the first two starts belongs to no step of the whole run.
    for more in (["--stop_after_steps", "4"], ["--stop_after_steps", "7"], []):
        run_ranks(train.main, 1, place, [*command, *NINE_STEPS, *every_three, *more])
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    for tag, kind, name in (("train/loss", "train", "loss"), ("eval/rewards/auc", "eval", "rewards/auc")):
        values = [(event.step, event.value) for event in events.Scalars(tag)]
        expected = [(line["step"], line[name]) for line in lines(out, kind)]
        assert [step for step, _ in values] == [3, 6, 9]
        assert values == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]
    times = [event.wall_time for event in events.Scalars("train/loss")]
    assert times[0] < times[1] < times[2]
    assert times[2] - times[0] > 0.5, "the first step's time is that of the first start"


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_rank_ends_all_with_75_and_a_checkpoint(place, command, number):
    argv = with_path([*command, "--max_epochs", "300"], place / "out")
    run = Start(place, argv)
    run.wait_for(lambda: steps_recorded(place / "out") >= 2)
    os.kill(run.ranks[1].pid, number)
    assert run.statuses() == [75, 75]
    errors = [log.read_text() for log in run.logs]
    step = steps_recorded(place / "out")
    name = signal.Signals(number).name
    assert errors[0].splitlines()[-1] == (
        f"stopped: {name} on rank 1: stopped after step {step} of 600. Start the same command again."
    )
    assert f"rank 1: {name}: stopping after this step" in errors[1]
    newest = (place / "out/checkpoints/latest").read_text()
    assert newest == f"global_step{step}"


def test_a_time_limit_stops_with_75(place, command):
    (code, said), _ = run_ranks(run_to_status, 2, place, [*command, "--max_time", "0:00:00:01", "--ref_mode", "model"])
    assert code == 75
    assert said.splitlines()[-1].startswith("stopped: the time limit --max_time 0:00:00:01 on rank 0: stopped after ")


@pytest.mark.parametrize("flag", ["--save_path", pytest.param("--ckpt_path", marks=pytest.mark.slow)])
def test_a_second_run_in_a_folder_of_a_living_one_ends_on_every_rank(place, command, flag):
    with RunLocks() as locks:
        locks.take(flag, place / ("out" if flag == "--save_path" else "shared"))
        ended = run_ranks(run_to_status, 2, place, [*command, "--ckpt_path", f"{place}/shared"])
    assert [code for code, _ in ended] == [2, 2]
    assert f"{flag}: a folder takes one run at a time; got {place}" in ended[0][1]
    assert f"where another run is active (process {os.getpid()} on " in ended[0][1]
    assert not list(place.glob("*/metrics.jsonl"))


def test_a_run_with_other_data_or_another_model_is_refused_before_a_model_loads(place, command):
    run_ranks(train.main, 1, place, [*command, "--stop_after_steps", "2"])
    rows = place / "rows.jsonl"
    text = rows.read_text()
    rows.write_text(text.replace("Is 3 even?", "Is 3 odd?"))
    ((code, said),) = run_ranks(run_to_status, 1, place, command)
    assert code == 1
    assert "these settings differ from the run that wrote the checkpoint: the training rows (fingerprint) was" in said
    rows.write_text(text)
    config = place / "model/config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    ((code, said),) = run_ranks(run_to_status, 1, place, [*command, "--learning_rate", "2e-3"])
    assert code == 1
    for name in (
        "the files of the policy was",
        "the files of the reference was",
        "--learning_rate was 0.001, is 0.002",
    ):
        assert name in said


def test_a_moved_model_and_moved_rows_are_the_same_run(place, command):
    run_ranks(train.main, 1, place, [*command, "--stop_after_steps", "2"])
    (place / "model").rename(place / "model 2")
    (place / "rows.jsonl").rename(place / "rows 2.jsonl")
    moved = [word.replace(f"{place}/model", f"{place}/model 2") for word in command]
    moved = [word.replace("rows.jsonl", "rows 2.jsonl") for word in moved]
    run_ranks(train.main, 1, place, moved)
    assert [line["step"] for line in lines(place / "out", "train")] == list(range(1, 5))


def test_no_key_is_in_a_checkpoint(place, command, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "SECRET123")
    monkeypatch.setenv("HF_TOKEN", "SECRET123")
    run_ranks(train.main, 1, place, [*command, "--stop_after_steps", "1"])
    files = [path for path in (place / "out").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"SECRET123" in path.read_bytes()]


def test_a_disk_that_is_too_small_is_said_at_the_start(place, command, monkeypatch):
    ((code, said),) = run_ranks(on_a_small_disk, 1, place, command)
    assert code == 2
    assert "--ckpt_path: a checkpoint, and what else is written there, needs" in said


def on_a_small_disk(argv):
    import shutil
    from collections import namedtuple

    usage, whole = namedtuple("usage", "total used free"), shutil.disk_usage
    # Enough for the model and its records, not for a checkpoint too.
    free = 32 * 2**20 + 300_000
    shutil.disk_usage = lambda path: usage(0, 0, free) if "checkpoints" in str(path) else whole(path)
    return run_to_status(argv)


def test_copies_are_models_that_transformers_loads(place, command):
    import transformers

    more = ["--save_hf_ckpt", "--save_steps", "3", "--max_ckpt_num", "2"]
    run_ranks(train.main, 2, place, [*command, *more])
    root = place / "out/checkpoints"
    names = sorted(path.name for path in root.iterdir() if path.is_dir())
    assert names == ["global_step3", "global_step3_hf", "global_step4", "global_step4_hf"]
    assert same(weights(root / "global_step4_hf"), weights(place / "out"))
    transformers.AutoModelForCausalLM.from_pretrained(root / "global_step3_hf")
    card = (root / "global_step3_hf/README.md").read_text()
    assert "The weights are those of step 3 of 4." in card
    assert "| metric | training, step 3 |" in card
    run_ranks(train.main, 1, place, with_path(command, place / "b", "--disable_ds_ckpt", "--save_hf_ckpt"))
    names = sorted(path.name for path in (place / "b/checkpoints").iterdir())
    assert names == ["global_step2_hf", "global_step4_hf"]
    assert json.loads((place / "b/checkpoints/global_step2_hf/config.json").read_text())["model_type"] == "llama"
