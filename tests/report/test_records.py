"""The records of a run: cut by step, whatever happened to the files, and never a reason to end."""

import json
import os

import pytest

from openkto.report.records import RecordFile, belongs_to, go_back, lines_of_older_version


def text(*lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


def train(step, **more):
    return {"kind": "train", "step": step} | more


RUN = {"kind": "run", "step": 0, "run_id": "a"}
EARLY_END = [{"kind": "eval", "step": 3}, {"kind": "summary", "step": 3}]


def test_records_are_cut_to_what_was_written_when_the_checkpoint_was_saved(tmp_path, caplog):
    # Step 3 was saved after its line and before the evaluation that ends a start early.
    (tmp_path / "metrics.jsonl").write_text(text(RUN, *map(train, (1, 2, 3)), *EARLY_END, train(4)))
    (tmp_path / "batches.jsonl").write_text(text(*({"step": step} for step in (1, 2, 3, 4))) + '{"step": 5, "ro')
    go_back(tmp_path, 3, {"train": 1}, train_lines=3)
    assert (tmp_path / "metrics.jsonl").read_text() == text(RUN, *map(train, (1, 2, 3)))
    assert (tmp_path / "batches.jsonl").read_text() == text(*({"step": step} for step in (1, 2, 3)))
    assert caplog.messages == []


def test_an_evaluation_of_the_step_itself_stays(tmp_path):
    lines = text(RUN, train(3), {"kind": "eval", "step": 3, "eval_set": "x"}, {"kind": "eval", "step": 3})
    (tmp_path / "metrics.jsonl").write_text(lines + text({"kind": "eval", "step": 3}))
    go_back(tmp_path, 3, {"train": 1, "eval": 2}, train_lines=1)
    assert (tmp_path / "metrics.jsonl").read_text() == lines


def test_a_checkpoint_of_an_older_version_keeps_no_step_twice(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(text(RUN, *map(train, (1, 2, 3)), EARLY_END[1], train(3), train(4)))
    go_back(tmp_path, 3, lines_of_older_version(has_open_window=False), train_lines=None)
    assert (tmp_path / "metrics.jsonl").read_text() == text(RUN, *map(train, (1, 2, 3)))
    go_back(tmp_path, 3, lines_of_older_version(has_open_window=True), train_lines=None)
    assert (tmp_path / "metrics.jsonl").read_text() == text(RUN, *map(train, (1, 2)))


def test_missing_lines_are_said_and_stop_nothing(tmp_path, caplog):
    (tmp_path / "batches.jsonl").write_text(text(*({"step": step} for step in (1, 2, 3))))
    go_back(tmp_path, 2, {"train": 1}, train_lines=2)
    assert (tmp_path / "batches.jsonl").read_text() == text({"step": 1}, {"step": 2})
    assert caplog.messages == [
        f"warning: {tmp_path}/metrics.jsonl: holds 0 of the 2 lines that were written up to step 2; the others were "
        "moved or deleted, or lie in another folder."
    ]


def test_a_broken_line_is_kept_aside_with_its_file_and_the_others_are_carried_on(tmp_path, caplog):
    broken = text(RUN, train(1)).encode() + b'\xff{"kind": "tr\n[1]\n' + text(train(2)).encode()
    (tmp_path / "metrics.jsonl").write_bytes(broken)
    go_back(tmp_path, 2, {"train": 1}, train_lines=2)
    assert (tmp_path / "metrics.jsonl").read_text() == text(RUN, train(1), train(2))
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == broken
    assert "line 3, 4 is none. It is kept as metrics.1.jsonl" in caplog.text


@pytest.mark.parametrize(("content", "is_own"), [
    (text(RUN, train(1)), True),
    (text(train(1), RUN), True),
    (text(RUN | {"run_id": "b"}), False),
    (text(train(1)), False),
    ("", True),
    ("\0\0\0\0\n", True),
    (None, True),
])  # fmt: skip
def test_a_record_says_whose_it_is_and_none_at_all_is_nobodys(tmp_path, content, is_own):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert belongs_to(tmp_path, "a") == is_own


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced", "folder deleted"])
def test_a_record_that_goes_away_is_begun_again_and_still_says_whose_it_is(tmp_path, how, caplog):
    folder = tmp_path / "out"
    file = folder / "metrics.jsonl"
    record = RecordFile(file)
    for line in (RUN, train(1), train(2)):
        record.write(line)
    if how == "deleted":
        file.unlink()
    elif how == "moved":
        file.rename(tmp_path / "mine.jsonl")
    elif how == "replaced":
        copy = tmp_path / "edited"
        copy.write_bytes(file.read_bytes())
        os.replace(copy, file)
    else:
        file.unlink()
        folder.rmdir()
    record.write(train(3))
    record.write(train(4))
    record.close()
    head = [RUN, train(1), train(2)] if how == "replaced" else [RUN | {"step": 2}]
    assert file.read_text() == text(*head, train(3), train(4))
    if how == "moved":
        assert (tmp_path / "mine.jsonl").read_text() == text(RUN, train(1), train(2))
    assert caplog.messages == [f"{file}: was moved, deleted or replaced; what follows goes into the file there now."]
