"""metrics.jsonl is complete whatever the trackers do, and training never waits for them."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from accelerate import tracking

from openkto.config import OutputConfig
from openkto.config.flags import parse
from openkto.config.output import TRACKERS
from openkto.errors import ConfigError
from openkto.report.of_accelerate import arguments_of, reserve_of
from openkto.report.samples import COLUMNS, as_rows
from openkto.report.trackers import QUEUE_LINES, TensorBoard, Trackers, named


class Recorder:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[tuple] = []
        self.is_closed = False

    def log(self, kind, step, values) -> None:
        self.lines.append((kind, step, values))

    def close(self) -> None:
        self.is_closed = True


class Raiser(Recorder):
    def log(self, kind, step, values) -> None:
        raise RuntimeError("no network")


class Hanger(Recorder):
    def log(self, kind, step, values) -> None:
        threading.Event().wait()


def only_files(folder, **more) -> Trackers:
    return Trackers(OutputConfig(save_path=str(folder), use_tensorboard="none"), {}, more)


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_line_is_on_disk_when_log_returns(tmp_path):
    trackers = only_files(tmp_path / "new" / "folder")
    trackers.log("train", 1, {"loss": 0.5, "consumed_samples": 128})
    assert lines_of(tmp_path / "new" / "folder") == [{"kind": "train", "step": 1, "loss": 0.5, "consumed_samples": 128}]
    trackers.close()


def test_a_value_that_is_absent_or_not_finite_is_left_out(tmp_path):
    recorder = Recorder()
    trackers = only_files(tmp_path, fake=lambda: recorder)
    trackers.log("train", 1, {"loss": float("nan"), "kl": float("inf"), "rewards/chosen": None, "grad_norm": 0.0})
    trackers.close()
    assert lines_of(tmp_path) == [{"kind": "train", "step": 1, "grad_norm": 0.0}]
    assert recorder.lines == [("train", 1, {"grad_norm": 0.0})]
    assert recorder.is_closed


def test_a_started_file_is_carried_on_after_a_line_cut_short(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "st')
    trackers = only_files(tmp_path)
    trackers.log("train", 2, {"loss": 0.5})
    trackers.close()
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last) == {"kind": "train", "step": 2, "loss": 0.5}


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        only_files(tmp_path / "file" / "out")
    assert str(caught.value) == (
        f"--save_path: must be a folder that can be written; got '{tmp_path}/file/out' (metrics.jsonl: "
        "Not a directory). Give another path."
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_gives_one_warning_and_no_error(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    trackers = only_files(tmp_path)
    for step in range(1, 4):
        trackers.log("train", step, {"loss": 0.5})
    trackers.close()
    assert [record.message for record in caplog.records] == [
        "metrics.jsonl: a line was lost (No space left on device); training continues."
    ]


class HalfFull:
    """A file on a disk that takes half of what it is given."""

    def __init__(self, file) -> None:
        self.file = file

    def fileno(self) -> int:
        return self.file.fileno()

    def write(self, content) -> int:
        return self.file.write(content[: len(content) // 2])


def test_a_line_that_only_half_fits_leaves_no_half(tmp_path):
    trackers = only_files(tmp_path)
    trackers.log("train", 1, {"loss": 0.5})
    whole, trackers._file._file = trackers._file._file, HalfFull(trackers._file._file)
    trackers.log("train", 2, {"loss": 0.5})
    trackers._file._file = whole
    trackers.log("train", 3, {"loss": 0.5})
    trackers.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 3]


def test_a_tracker_that_raises_is_off_after_one_warning(tmp_path, caplog):
    other = Recorder()
    trackers = only_files(tmp_path, broken=Raiser, fake=lambda: other)
    for step in range(1, 6):
        trackers.log("train", step, {"loss": 0.5})
        time.sleep(0.01)
    trackers.close()
    assert [record.message for record in caplog.records] == [
        "broken: is switched off (RuntimeError: no network); training continues."
    ]
    assert len(lines_of(tmp_path)) == len(other.lines) == 5


def test_a_tracker_that_cannot_start_is_off_after_one_warning(tmp_path, caplog):
    has_logged = threading.Event()

    def slow_start() -> Recorder:
        assert has_logged.wait(60)  # training does not wait for the start
        raise TimeoutError("no answer")

    trackers = only_files(tmp_path, slow=slow_start)
    trackers.log("train", 1, {"loss": 0.5})
    has_logged.set()
    trackers.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_tracker_that_hangs_costs_training_nothing(tmp_path, caplog):
    trackers = only_files(tmp_path, hung=Hanger)
    started = time.monotonic()
    for step in range(1, QUEUE_LINES + 100):
        trackers.log("train", step, {"loss": 0.5})
    trackers.close(timeout_seconds=0.3)
    assert time.monotonic() - started < 30
    assert len(lines_of(tmp_path)) == QUEUE_LINES + 99
    assert [record.message for record in caplog.records] == [
        "hung: does not keep up; values are left out there, not in metrics.jsonl.",
        "hung: did not finish in time; its last values are only in metrics.jsonl.",
    ]


def test_names_carry_the_kind_and_the_evaluation_set():
    assert named("train", {"loss": 0.5, "kl": 1}) == {"train/loss": 0.5, "train/kl": 1}
    assert named("eval", {"loss": 0.5}) == {"eval/loss": 0.5}
    assert named("eval", {"loss": 0.5, "eval_set": "math"}) == {"eval/math/loss": 0.5}


def test_tensorboard_files_hold_the_values(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = Trackers(OutputConfig(save_path=str(tmp_path)), {})
    trackers.log("run", 0, {"torch": "2.13.0"})
    for step in (1, 2):
        trackers.log("train", step, {"loss": 0.5 / step, "rewards/auc": 0.75})
    trackers.log("eval", 2, {"loss": 0.125, "eval_set": "math"})
    trackers.close(timeout_seconds=60)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/rewards/auc", "eval/math/loss"}
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]


def test_tensorboard_can_be_turned_off_or_moved(tmp_path):
    only_files(tmp_path / "off").close()
    assert [path.name for path in (tmp_path / "off").iterdir()] == ["metrics.jsonl"]
    TensorBoard(str(tmp_path / "moved")).close()
    assert list((tmp_path / "moved").iterdir())


def test_wandb_without_its_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        Trackers(OutputConfig(save_path=str(tmp_path), use_tensorboard="none", use_wandb=True), {})
    assert str(caught.value) == (
        "--use_wandb: needs the package wandb; got a Python without it. Run pip install wandb, or leave it out."
    )


# A package of the name of trackio that writes down what it is told.
STAND_IN = """
import json, pathlib
told = pathlib.Path(__file__).with_name("told.jsonl").open("a")
def tell(what, **values):
    print(json.dumps([what, values]), file=told, flush=True)
class Run:
    def log(self, values, step): tell("log", step=step, **values)
    def finish(self): tell("finish")
class Config:
    def update(self, values, allow_val_change): tell("config", **values)
config = Config()
def init(**names):
    tell("init", **names)
    return Run()
"""


def test_a_tracker_of_accelerates_gets_settings_values_and_the_end(tmp_path, monkeypatch, caplog):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/trackio.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "package")
    output = OutputConfig(
        save_path=str(tmp_path / "out"), use_tensorboard="none", report_to=["trackio"], wandb_run_name="a run"
    )
    trackers = Trackers(output, {"beta": 0.1, "dataset": ["a", "b"], "max_steps": None})
    trackers.log("run", 0, {"torch": "2.13.0", "world_size": 2})
    trackers.log("train", 1, {"loss": 0.5})
    trackers.log("eval", 1, {"loss": 0.25, "eval_set": "math"})
    trackers.show_samples(1, [])
    trackers.log("summary", 1, {"ended": "last step", "seconds": 2.5})
    trackers.close(timeout_seconds=60)
    assert not caplog.records
    assert [json.loads(line) for line in (tmp_path / "package/told.jsonl").read_text().splitlines()] == [
        ["init", {"project": "openkto", "name": "a run"}],
        ["config", {"beta": 0.1, "dataset": "['a', 'b']", "run/torch": "2.13.0", "run/world_size": 2}],
        ["log", {"step": 1, "train/loss": 0.5}],
        ["log", {"step": 1, "eval/math/loss": 0.25}],
        ["log", {"step": 1, "summary/seconds": 2.5}],
        ["finish", {}],
    ]


def test_every_tracker_that_may_be_named_is_one_that_accelerate_makes(tmp_path):
    known = dict(tracking.LOGGER_TYPE_TO_CLASS)
    assert set(known) - {"tensorboard"} == set(TRACKERS)
    for name in set(known) - {"tensorboard", "wandb"}:
        names, more = arguments_of(name, OutputConfig(save_path=str(tmp_path)))
        assert known[name](*names, **more).name == name


def test_packages_that_upload_more_by_themselves_are_told_not_to(monkeypatch):
    """Source code, the command line (SwanLab reads it from the system), the terminal's text."""
    output = OutputConfig(wandb_run_name="a run")

    class Settings(SimpleNamespace):
        Probe = Terminal = SimpleNamespace

    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(ExperimentConfig=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "swanlab", SimpleNamespace(Settings=Settings))
    comet, swanlab = (
        vars(reserve_of("comet_ml", output)["experiment_config"]),
        reserve_of("swanlab", output)["settings"],
    )
    assert comet.pop("name") == "a run"
    assert {"log_code", "parse_args", "auto_output_logging"} <= comet.keys()
    assert not any(comet.values())
    assert (swanlab.probe.runtime, swanlab.terminal.proxy_type, swanlab.interactive) == (False, "none", False)
    clearml, aim = (arguments_of(name, output)[1] for name in ("clearml", "aim"))
    assert clearml["auto_connect_arg_parser"] is clearml["auto_connect_streams"] is False
    assert clearml["auto_connect_frameworks"] is False  # a saved model is no business of a tracker
    assert aim["capture_terminal_logs"] is False


def test_report_to_wandb_is_use_wandb_and_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    needed = ["--pretrain", "m", "--dataset", "rows.jsonl", "--report_to"]
    for name, install in (("comet_ml", "comet-ml"), ("wandb", "wandb")):
        with pytest.raises(ConfigError) as caught:
            parse([*needed, "tensorboard", name], "train")
        cure = f"Run pip install {install}, or leave it out."
        assert str(caught.value) == f"--report_to: needs the package {name}; got a Python without it. {cure}"
        with pytest.raises(ConfigError, match=f"needs the package {name}; got a Python without it"):
            Trackers(OutputConfig(save_path=str(tmp_path), use_tensorboard="none", report_to=[name]), {})
    with pytest.raises(ConfigError, match=r"--report_to: must be one of aim, .* or tensorboard; got 'neptune'"):
        parse([*needed, "neptune"], "train")
    with pytest.raises(ConfigError, match="--report_to: must not name tensorboard when that is off"):
        parse([*needed, "tensorboard", "--use_tensorboard", "none"], "train")


WANDB_RUN = """
import sys
from openkto.config import OutputConfig
from openkto.report.of_accelerate import arguments_of
from openkto.report.trackers import Trackers
output = OutputConfig(save_path=sys.argv[1], use_tensorboard="none", use_wandb=True)
trackers = Trackers(output, {"beta": 0.1}, run_id="a1b2c3d4")
for step in (1, 2, 2):
    trackers.log("train", step, {"loss": 0.5})
trackers.close(60)
"""


def run_wandb(folder, **environment) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    clean |= {"HOME": str(folder), "NETRC": str(folder / "netrc"), **environment}
    command = [sys.executable, "-c", WANDB_RUN, str(folder / "out")]
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_wandb_works_offline_and_its_key_is_in_no_file(tmp_path):
    key = "a1b2c3d4" * 5
    done = run_wandb(tmp_path, WANDB_MODE="offline", WANDB_API_KEY=key, HF_TOKEN="hf_SECRET123")
    # Every start of a run goes on under the run's own id.
    assert list((tmp_path / "out" / "wandb").glob("offline-run-*-a1b2c3d4/run-a1b2c3d4.wandb")), done.stderr
    assert "is switched off" not in done.stderr
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        content = path.read_bytes()
        assert key.encode() not in content, path
        assert b"hf_SECRET123" not in content, path


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_wandb_without_a_key_is_off_and_never_asks_for_one(tmp_path):
    done = run_wandb(tmp_path)
    assert done.stderr.count("W&B: is switched off") == 1
    assert "set WANDB_API_KEY or run `wandb login`" in done.stderr
    assert len(lines_of(tmp_path / "out")) == 3


SAMPLE = {"sample": 0, "source": "eval", "prompt": "a|b", "greedy": "<s>\nno", "sampled": "yes"}


def test_answers_are_shown_as_a_table_by_every_tracker_that_takes_it(tmp_path):
    shown = []

    class Shows(Recorder):
        def show_samples(self, step, lines) -> None:
            shown.append((step, lines))

    trackers = only_files(tmp_path, fake=Shows)
    trackers.show_samples(4, [SAMPLE])
    trackers.close()
    assert shown == [(4, [SAMPLE])]


def test_tensorboard_shows_the_answers_of_each_step_once_after_a_resume(tmp_path):
    first = TensorBoard(str(tmp_path), "run")
    for step in (0, 4, 8):
        first.show_samples(step, [SAMPLE])
    first.close()
    # Step 8 is made again: samples.jsonl was cut back to step 4.
    resumed = TensorBoard(str(tmp_path), "run", [], 4, [{"step": step, **SAMPLE} for step in (0, 4)])
    resumed.show_samples(8, [SAMPLE])
    resumed.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload().Tensors("samples/text_summary")
    assert [event.step for event in events] == [0, 4, 8]
    table = events[0].tensor_proto.string_val[0].decode()
    assert table.splitlines()[2] == "|  | eval | a&#124;b | &lt;s><br>no | yes |  |  |"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="W&B is not installed")
def test_wandb_takes_a_table_of_every_column():
    import wandb

    table = wandb.Table(columns=list(COLUMNS), data=as_rows([{"step": 4, **SAMPLE, "label": True}]))
    assert table.data == [[4, "eval", "a|b", "<s>\nno", "yes", None, True]]
