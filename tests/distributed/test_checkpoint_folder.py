"""Which checkpoints are complete, which is newest, which have to go: plain files, no engine."""

import json
import os
import shutil

import pytest

from openkto.distributed import checkpoint_folder as layout
from openkto.distributed import manifest as manifests
from openkto.distributed.engine_files import FileRecord, HashedFile, RecordingCheckpointEngine
from openkto.errors import CheckpointError
from openkto.files import hash_file


def write(root, step, size=10, time=None):
    """Write a complete checkpoint of one file."""
    folder = root / layout.name_of(step)
    folder.mkdir(parents=True)
    (folder / "state.json").write_bytes(b"x" * size)
    record = FileRecord(size, hash_file(folder / "state.json"))
    manifests.write_manifest(folder, {"state.json": record}, layout.next_time(root) if time is None else time)
    return folder


def problem(folder) -> str | None:
    try:
        return manifests.problem_with(folder, manifests.read_manifest(folder).files)
    except CheckpointError as error:
        return str(error)


def test_a_complete_checkpoint_has_no_problem(tmp_path):
    assert problem(write(tmp_path, 3)) is None


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda file: file.write_bytes(b"x" * 9), "state.json has 9 bytes of 10"),
        (lambda file: file.write_bytes(b""), "state.json has 0 bytes of 10"),
        (lambda file: file.write_bytes(b"x" * 9 + b"y"), "state.json is not what was written"),
        (lambda file: file.unlink(), "state.json: No such file or directory"),
        (lambda file: (file.parent / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda file: (file.parent / "manifest.json").write_text(""), "manifest.json is damaged"),
        (lambda file: (file.parent / "manifest.json").write_text("[1]"), "manifest.json is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_told_from_a_complete_one(tmp_path, damage, expected):
    folder = write(tmp_path, 3)
    damage(folder / "state.json")
    assert problem(folder) == expected


def test_any_flipped_bit_of_a_manifest_is_seen(tmp_path):
    manifest = write(tmp_path, 3) / "manifest.json"
    content = manifest.read_bytes()
    for i in range(len(content)):
        manifest.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        # Blanks between JSON's words carry nothing.
        changed = json.loads(content) != _loaded(manifest)
        assert (problem(manifest.parent) is not None) == changed, content[max(0, i - 20) : i + 20]


def _loaded(path):
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None


def test_the_newest_is_the_last_one_written_whatever_its_step(tmp_path):
    for step in (10, 20, 12):
        write(tmp_path, step)
    (tmp_path / "global_step99_hf").mkdir()
    (tmp_path / ".saving").mkdir()
    assert layout.checkpoints_in(tmp_path) == ["global_step12", "global_step20", "global_step10"]


def test_a_damaged_manifest_does_not_make_a_checkpoint_older(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "global_step3/manifest.json").write_text("")
    assert layout.checkpoints_in(tmp_path)[0] == "global_step3"


def test_a_later_checkpoint_is_newer_when_the_clock_goes_back(tmp_path):
    write(tmp_path, 10, time=4e9)
    assert layout.next_time(tmp_path) > 4e9


def test_the_oldest_go_and_the_best_and_the_newest_stay(tmp_path):
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    layout.point_to(tmp_path, "best", "global_step2")
    deleted = layout.rotate(tmp_path, "global_step5", max_number=3, max_gigabytes=1e8)
    assert deleted == ["global_step1", "global_step3"]
    assert layout.checkpoints_in(tmp_path) == ["global_step5", "global_step4", "global_step2"]


@pytest.mark.parametrize("limits", [{"max_number": 1, "max_gigabytes": 1e8}, {"max_number": 9, "max_gigabytes": 1e-9}])
def test_the_newest_stays_under_any_limit(tmp_path, limits):
    write(tmp_path, 1)
    write(tmp_path, 2)
    assert layout.rotate(tmp_path, "global_step2", **limits) == ["global_step1"]
    assert layout.rotate(tmp_path, "global_step2", **limits) == []


def test_gigabytes_count_copies_too_and_a_copy_goes_with_its_checkpoint(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step, size=400)
        copy = tmp_path / f"global_step{step}_hf"
        copy.mkdir()
        (copy / "model.safetensors").write_bytes(b"x" * 1000)
    total = layout.folder_bytes(tmp_path)
    assert layout.rotate(tmp_path, "global_step3", max_number=9, max_gigabytes=(total - 1) / 1e9) == ["global_step1"]
    assert not (tmp_path / "global_step1_hf").exists()
    assert (tmp_path / "global_step2_hf").exists()


def test_a_kill_in_the_middle_of_a_deletion_leaves_nothing_like_a_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        write(tmp_path, step)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        layout.rotate(tmp_path, "global_step3", max_number=2, max_gigabytes=1e8)
    assert layout.checkpoints_in(tmp_path) == ["global_step3", "global_step2"]


def test_an_earlier_runs_checkpoints_do_not_count(tmp_path):
    write(tmp_path, 9, size=10_000)
    layout.set_aside(tmp_path)
    write(tmp_path, 1)
    write(tmp_path, 2)
    assert layout.rotate(tmp_path, "global_step2", max_number=2, max_gigabytes=5e-6) == []


def test_copies_alone_are_counted_like_checkpoints(tmp_path):
    for step in (1, 2, 10):
        (tmp_path / f"global_step{step}_hf").mkdir()
    assert layout.rotate(tmp_path, "global_step10", max_number=1, max_gigabytes=1e8) == ["global_step1", "global_step2"]


def test_a_new_run_sets_all_of_the_earlier_one_aside(tmp_path):
    assert layout.set_aside(tmp_path) is None
    for _ in range(2):
        write(tmp_path, 3)
        layout.point_to(tmp_path, "latest", "global_step3")
        layout.set_aside(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["earlier-1", "earlier-2"]
    assert sorted(os.listdir(tmp_path / "earlier-2")) == ["global_step3", "latest"]


def test_a_folder_is_replaced_only_by_a_complete_one(tmp_path):
    write(tmp_path, 3, size=5)
    scratch = tmp_path / ".saving"
    layout.put_in_place(write(scratch, 3, size=7), tmp_path / "global_step3")
    assert (tmp_path / "global_step3/state.json").stat().st_size == 7
    assert os.listdir(scratch) == []


def test_a_full_disk_is_noted_and_not_raised(tmp_path):
    file = HashedFile(tmp_path / "no" / "file")
    assert file.write(b"abc") == 3
    file.close()
    assert isinstance(file.failure, FileNotFoundError)
    recorder = RecordingCheckpointEngine()
    recorder.save({"a": 1}, "/dev/full")
    assert recorder.failure == "OSError: No space left on device"
    recorder.save({"a": 1}, str(tmp_path / "later.pt"))
    assert not (tmp_path / "later.pt").exists()


def test_what_is_written_is_what_is_recorded(tmp_path):
    recorder = RecordingCheckpointEngine()
    recorder.save({"a": [1, 2, 3]}, str(tmp_path / "a.pt"))
    assert recorder.failure is None
    record = recorder.files["a.pt"]
    assert record == FileRecord((tmp_path / "a.pt").stat().st_size, hash_file(tmp_path / "a.pt"))
    assert recorder.load(str(tmp_path / "a.pt")) == {"a": [1, 2, 3]}


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x80\x04.", b"PK\x03\x04" + b"\xff" * 40])
def test_a_file_that_cannot_be_checked_is_not_read(tmp_path, content):
    (tmp_path / "a.pt").write_bytes(content)
    record = FileRecord(len(content), hash_file(tmp_path / "a.pt"))
    assert manifests.problem_with(tmp_path, {"a.pt": record}) == "a.pt is no file of a checkpoint"


def test_a_checkpoint_has_the_files_that_were_written_and_no_other(tmp_path):
    files = {"state.json": FileRecord(0, ""), "arrays.safetensors": FileRecord(0, "")}
    assert manifests.problem_with_names(tmp_path, files) is None
    (tmp_path / "zero_pp_rank_9_mp_rank_00_optim_states.pt").touch()
    assert manifests.problem_with_names(tmp_path, files) == "zero_pp_rank_9_mp_rank_00_optim_states.pt was added"
    del files["arrays.safetensors"]
    assert manifests.problem_with_names(tmp_path, files) == "arrays.safetensors was not written"


class Planted:
    def __reduce__(self):
        return os.system, ("touch planted",)


def test_a_pickle_that_would_run_code_is_neither_read_nor_taken_for_complete(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = RecordingCheckpointEngine()
    recorder.save({"a": Planted()}, "x_optim_states.pt")
    found = manifests.problem_with(tmp_path, recorder.files)
    assert found == "x_optim_states.pt holds posix.system, which could run code"
    with pytest.raises(Exception, match=r"posix\.system"):
        recorder.load("x_optim_states.pt")
    assert not (tmp_path / "planted").exists()
