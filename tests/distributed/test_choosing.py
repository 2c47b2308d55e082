"""What `--load_checkpoint` may be, and what somebody else's checkpoint must not be able to do: files, no engine."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from openkto.distributed import checkpoint_folder as layout
from openkto.distributed import manifest as manifests
from openkto.distributed.checkpoint import Checkpoints
from openkto.distributed.choosing import choose
from openkto.distributed.engine_files import FileRecord
from openkto.distributed.manifest import _digest
from openkto.errors import CheckpointError
from openkto.files import hash_file


class Alone:
    """The one rank of a run."""

    rank, world_size = 0, 1

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


def state_of(step: int, **changes: Any) -> dict[str, Any]:
    run = {"step": step, "updates": step, "consumed_samples": 4 * step, "best_step": -1, "run_id": "0a1b2c3d"}
    return {
        "run": run, "updates": step, "identity": {"--beta": 0.1}, "total_steps": 9, "settings": {},
        "reporter": {"sizes": {"metrics.jsonl": 7}},
    } | changes  # fmt: skip


def write(root: Path, step: int, state: dict[str, Any] | None = None, name: str | None = None) -> Path:
    """Write a complete checkpoint."""
    folder = root / (name or layout.name_of(step))
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(state or state_of(step)))
    (folder / "arrays.safetensors").write_bytes(b"arrays")
    record(folder, "state.json", "arrays.safetensors")
    return folder


def record(folder: Path, *names: str, **more: Any) -> None:
    """Write the manifest that somebody would, to pass other files for a checkpoint's."""
    files = {name: FileRecord((folder / name).stat().st_size, hash_file(folder / name)) for name in names}
    manifests.write_manifest(folder, files, layout.next_time(folder.parent))
    if more:
        content = json.loads((folder / "manifest.json").read_text())
        del content["sha256"]
        for key, value in more.items():
            content[key] = content[key] | value if isinstance(value, dict) else value
        (folder / "manifest.json").write_text(json.dumps(content | {"sha256": _digest(content)}))


def said(root: Path, wanted: bool | str = True) -> str:
    """Return why nothing is chosen; what waits for ever fails the test."""
    earlier = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    try:
        with pytest.raises(CheckpointError) as refused:
            choose(root, Alone(), wanted)
        return str(refused.value)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)


def give_up(number: int, frame: object) -> None:
    raise TimeoutError("this waits for ever")


# ---- what a path stands for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("out", 4), ("out/checkpoints", 4), ("out/checkpoints/global_step3", 3), ("out/checkpoints/latest", 4),
        ("out/checkpoints/best", 3), ("out/best", 3), ("out/latest", 4), ("best", 3), ("latest", 4), ("renamed", 2),
    ],
)  # fmt: skip
def test_a_run_a_folder_a_checkpoint_and_a_pointer_are_understood(tmp_path, monkeypatch, path, step):
    monkeypatch.chdir(tmp_path)
    root = Path("out/checkpoints")
    for number in (2, 3, 4):
        write(root, number)
    write(Path(), 2, name="renamed")
    layout.point_to(root, "latest", "global_step4")
    layout.point_to(root, "best", "global_step3")
    found = choose(root, Alone(), path)
    assert found.state["run"]["step"] == step
    monkeypatch.chdir("/")
    assert (
        choose(tmp_path / root, Alone(), path if path in layout.POINTERS else str(tmp_path / path)).state == found.state
    )


def test_a_pointer_that_names_nothing_is_no_checkpoint(tmp_path):
    write(tmp_path, 3)
    for content in (b"global_step7", b"../elsewhere", b"\xff\xfe", b""):
        (tmp_path / "best").write_bytes(content)
        for path in (f"{tmp_path}/best", "best"):
            assert said(tmp_path, path) == (
                f"--load_checkpoint: must be a complete checkpoint; got {path}: no checkpoint is there. Name another."
            )


@pytest.mark.parametrize("name", ["global_step0000004", "global_step٤", "global_step4 ", "global_step" + "9" * 400])
def test_a_name_that_no_run_gives_is_not_believed(tmp_path, name):
    if len(name) < 200:
        write(tmp_path, 4, name=name)
    assert layout.NAME.fullmatch(name) is None
    assert layout.checkpoints_in(tmp_path) == []
    assert choose(tmp_path, Alone(), True) is None


def test_a_name_that_lies_about_its_step_is_not_believed(tmp_path):
    write(tmp_path, 3)
    write(tmp_path, 5, state_of(4))
    assert choose(tmp_path, Alone(), True).folder.name == "global_step3"
    assert "global_step5: is not complete: state.json is of step 4." in said(tmp_path, str(tmp_path / "global_step5"))


def test_a_later_versions_checkpoint_is_refused_and_an_earlier_one_is_not_taken_instead(tmp_path):
    record(write(tmp_path, 3), "state.json", "arrays.safetensors")
    record(write(tmp_path, 4), "state.json", "arrays.safetensors", format=2)
    assert said(tmp_path) == (
        f"--load_checkpoint: {tmp_path}/global_step4: must be of format 1 or earlier; got format 2. Update OpenKTO, or "
        "name a checkpoint of this version."
    )
    assert choose(tmp_path, Alone(), str(tmp_path / "global_step3")).state["run"]["step"] == 3


# ---- somebody else's ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../thesis.txt", "/dev/zero", "state.json/../x", ".hidden_states.pt", "", "a\x00.pt"])
def test_a_manifest_names_files_of_a_checkpoint_only(tmp_path, name):
    record(write(tmp_path, 3), "state.json", "arrays.safetensors", files={name: [0, "0" * 64]})
    assert f"manifest.json names {name!r}, which is no file of a checkpoint" in said(tmp_path)


@pytest.mark.parametrize("name", ["state.json", "arrays.safetensors", "manifest.json"])
@pytest.mark.parametrize("kind", ["a link", "a pipe", "a folder", "a device"])
def test_what_is_no_regular_file_is_not_opened(tmp_path, name, kind):
    file = write(tmp_path, 3) / name
    content = file.read_bytes()
    file.unlink()
    if kind == "a link":
        (tmp_path / "elsewhere").write_bytes(content)
        file.symlink_to(tmp_path / "elsewhere")
    elif kind == "a pipe":
        os.mkfifo(file)
    elif kind == "a folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero")
    assert ("manifest.json is damaged" if name == "manifest.json" else f"{name} is no regular file") in said(tmp_path)


@pytest.mark.parametrize("name", ["x_optim_states.pt", "reference.safetensors"])
def test_a_file_that_nobody_wrote_is_not_read(tmp_path, name):
    (write(tmp_path, 3) / name).symlink_to("/dev/zero")
    assert f"{name} was added" in said(tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reporter": {"sizes": {"../thesis.txt": 0}}}, "names '../thesis.txt', which is no record of a run"),
        ({"reporter": {"sizes": {"/etc/hosts": 0}}}, "names '/etc/hosts', which is no record of a run"),
        ({"reporter": {"sizes": {"run.yaml": 0}}}, "names 'run.yaml', which is no record of a run"),
        ({"reporter": {"sizes": {"metrics.jsonl": -1}}}, "has no count where one must be"),
        ({"reporter": []}, "holds something else than a run's state"),
        ({"identity": []}, "holds something else than a run's state"),
        ({"total_steps": "9"}, "has no count where one must be"),
        ({"run": state_of(3)["run"] | {"run_id": "*"}}, "names the run '*', which is no run's name"),
        ({"run": {}}, "cannot be read ('step')"),
    ],
)
def test_a_state_that_no_run_wrote_is_refused(tmp_path, changes, expected):
    (tmp_path / "thesis.txt").write_text("years")
    write(tmp_path / "checkpoints", 3, state_of(3, **changes))
    assert f"state.json {expected}" in said(tmp_path / "checkpoints")
    assert (tmp_path / "thesis.txt").read_text() == "years"


@pytest.mark.parametrize("text", ["[" * 100_000, "null", '{"saved_at": NaN}', '{"sha256": "", "files": 1}'])
def test_json_of_another_kind_is_a_damaged_manifest(tmp_path, text):
    (write(tmp_path, 3) / "manifest.json").write_text(text)
    assert "manifest.json is damaged" in said(tmp_path)


# ---- pointers -------------------------------------------------------------------------------------------------------


def test_a_start_puts_right_what_a_kill_between_a_checkpoint_and_its_names_left(tmp_path):
    write(tmp_path, 2)
    best = state_of(3)
    best["run"]["best_step"] = 3
    write(tmp_path, 3, best)
    layout.point_to(tmp_path, "latest", "global_step2")
    (tmp_path / "best.part").touch()
    checkpoints = Checkpoints(tmp_path, Alone())
    checkpoints.make_folder()
    checkpoints.choose(True)
    assert [layout.pointed_to(tmp_path, pointer) for pointer in ("latest", "best")] == ["global_step3"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "global_step2", "global_step3", "latest"]
    before = (tmp_path / "best").stat().st_mtime_ns
    Checkpoints(tmp_path, Alone()).choose(True)
    assert (tmp_path / "best").stat().st_mtime_ns == before


def test_a_path_into_another_run_changes_nothing_there(tmp_path):
    write(tmp_path / "a", 3)
    Checkpoints(tmp_path / "b", Alone()).choose(f"{tmp_path}/a")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["global_step3"]


def test_the_best_stays_whatever_the_pointer_says(tmp_path):
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    (tmp_path / "best").write_text("global_step1")
    assert layout.rotate(tmp_path, "global_step5", 2, 1e8, best_step=3) == [
        "global_step1",
        "global_step2",
        "global_step4",
    ]
    # Where the best one was lost, the one before that still has the name is kept.
    write(tmp_path, 6)
    (tmp_path / "best").write_text("global_step3")
    assert layout.rotate(tmp_path, "global_step6", 1, 1e8, best_step=4) == ["global_step5"]


def test_a_deletion_that_fails_is_said_and_fails_nothing_else(tmp_path, monkeypatch, caplog):
    for step in (1, 2, 3):
        write(tmp_path, step)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "global_step1":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    assert layout.rotate(tmp_path, "global_step3", 1, 1e8) == ["global_step2"]
    assert caplog.messages == ["warning: checkpoint global_step1: could not be deleted (Input/output error)."]
    assert layout.checkpoints_in(tmp_path) == ["global_step3", "global_step1"]


def test_a_checkpoint_whose_replacement_was_killed_gets_its_name_back(tmp_path):
    write(tmp_path, 3)
    (tmp_path / ".saving").mkdir()
    (tmp_path / "global_step3").rename(tmp_path / ".saving/global_step3.replaced")
    (tmp_path / ".probe-0a1b").touch()
    layout.clear(tmp_path)
    assert os.listdir(tmp_path) == ["global_step3"]
