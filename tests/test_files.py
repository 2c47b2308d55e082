"""What killed writers leave is told from what is being written."""

import json
import os
import subprocess
import sys
import time

from openkto.commands.evaluate import write_numbers
from openkto.files import SECONDS_OF_A_STRANGER, delete_leftovers, scratch_name

WRITE = "import openkto.files as f; print(f.scratch_name('rows'))"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_a_dead_process_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    dead = subprocess.run([sys.executable, "-c", WRITE], capture_output=True, text=True, check=True).stdout.strip()
    mine = scratch_name("rows")
    (tmp_path / dead).mkdir()
    (tmp_path / dead / "half").write_text("x")
    (tmp_path / scratch_name("file").replace(f".{os.getpid()}-", f".{os.getpid()}-9")).write_text("a reused number")
    (tmp_path / mine).mkdir()
    (tmp_path / "rows.part").write_text("somebody's own")
    delete_leftovers(tmp_path)
    assert names(tmp_path) == sorted([mine, "rows.part"])
    delete_leftovers(tmp_path / "nothing")


def test_what_another_machine_writes_is_left_alone_for_a_day(tmp_path):
    path = tmp_path / "rows.node7-402653.17-123456-0a1b2c3d.part"
    path.mkdir()
    (path / "half").write_text("x")
    long_ago = time.time() - SECONDS_OF_A_STRANGER - 60
    os.utime(path, (long_ago, long_ago))
    delete_leftovers(tmp_path)
    assert names(tmp_path) == [path.name], "a file in it was changed just now"
    os.utime(path / "half", (long_ago, long_ago))
    delete_leftovers(tmp_path)
    assert names(tmp_path) == []


def test_a_link_goes_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_text("x")
    dead = subprocess.run([sys.executable, "-c", WRITE], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / dead).symlink_to(tmp_path / "kept")
    delete_leftovers(tmp_path)
    assert names(tmp_path) == ["kept"]
    assert (tmp_path / "kept/file").exists()


def test_the_numbers_of_an_earlier_evaluation_are_kept_unless_the_file_was_named(tmp_path):
    output = tmp_path / "evaluation.json"
    for loss in (0.5, 0.5, 0.25):
        write_numbers({"held_out": {"loss": loss}}, output, replaces=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluation.1.json", "evaluation.json"]
    assert json.loads((tmp_path / "evaluation.1.json").read_text())["held_out"]["loss"] == 0.5
    write_numbers({"held_out": {"loss": 0.125}}, output, replaces=True)
    assert json.loads(output.read_text())["held_out"]["loss"] == 0.125
    assert len(list(tmp_path.iterdir())) == 2
