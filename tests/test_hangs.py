"""A rank that is gone, or that does not move: what the others say, and how the run ends; whole commands, two ranks."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from openkto.commands.run import run
from openkto.process import watchdog
from openkto.process.ranks import loss_of_a_rank
from tests.helpers.starts import Start, steps_recorded
from tests.text_rows import write_model, write_rows

SECONDS = 60


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that starts a long run on two ranks and waits for its third step."""
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 40)
    runs = []

    def begin(*more: str, before: Callable[[int], None] | None = None) -> Start:
        argv = [
            "--pretrain", f"{tmp_path}/model", "--dataset", f"{tmp_path}/rows.jsonl", "--save_path", f"{tmp_path}/out",
            "--train_batch_size", "4", "--max_steps", "2000", "--param_dtype", "fp32", "--save_steps", "2",
            "--use_tensorboard", "none", "--load_checkpoint", *more,
        ]  # fmt: skip
        runs.append(Start(tmp_path, argv, before))
        runs[-1].wait_for(lambda: steps_recorded(tmp_path / "out") >= 3)
        return runs[-1]

    yield begin
    for process in (process for one in runs for process in one.ranks):
        process.kill()


def test_a_rank_that_was_stopped_ends_the_run_with_a_status_that_requeues(start):
    one = start("--stall_minutes", "0.02", "--stall_end_minutes", "0.08")
    os.kill(one.ranks[1].pid, signal.SIGSTOP)
    one.ranks[0].join(SECONDS)
    assert one.ranks[0].exitcode == 75
    said = one.logs[0].read_text()
    assert "rank 0: no progress for 0.02 min in: " in said
    assert said.splitlines()[-1].startswith("rank 0: stopped: no progress for 0.1 min in: ")
    # Where the other goes on it is not its own stall that ends it, but that the first is gone.
    os.kill(one.ranks[1].pid, signal.SIGCONT)
    one.ranks[1].join(SECONDS)
    assert one.ranks[1].exitcode == 1
    assert one.logs[1].read_text().splitlines()[-1].startswith("error: rank 1: another rank is gone")


def lose_patience(rank: int) -> None:
    watchdog.SECONDS_TO_STOP = 2.0
    watchdog.LONGEST_NAP_SECONDS = 0.1


def test_a_signal_to_a_rank_that_waits_for_another_has_its_effect(start):
    one = start(before=lose_patience)
    os.kill(one.ranks[1].pid, signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(one.ranks[0].pid, signal.SIGTERM)
    one.ranks[0].join(SECONDS)
    assert one.ranks[0].exitcode == 75
    said = one.logs[0].read_text()
    assert "rank 0: SIGTERM: stopping after this step" in said
    assert "rank 0: SIGTERM: still in: " in said


@pytest.mark.slow  # the first test sees the sentence, too
def test_the_survivors_of_a_killed_rank_say_so_in_one_sentence(start):
    one = start()
    one.ranks[1].kill()
    one.ranks[0].join(SECONDS)
    assert one.ranks[0].exitcode == 1
    assert one.logs[0].read_text().splitlines()[-1] == f"error: rank 0: {loss_of_a_rank(RuntimeError('gloo: closed'))}"


@pytest.mark.parametrize(
    "text",
    [
        "[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:20417",
        "[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 7200000ms for recv operation to complete",
        "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error",
        "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    ],
)
def test_the_libraries_words_for_a_lost_rank_are_known(text):
    error = ValueError("wrapped")
    error.__cause__ = RuntimeError(text)
    assert "another rank is gone" in loss_of_a_rank(error)


def test_other_errors_are_no_lost_rank():
    for text in ("mat1 and mat2 shapes cannot be multiplied", "the connection", "NCCL error: invalid usage"):
        assert loss_of_a_rank(RuntimeError(text)) is None


def test_a_file_that_cannot_be_read_is_one_sentence(capsys):
    def main(argv: list[str]) -> None:
        Path("/proc/1/mem/x").read_text()

    assert run(main, []) == 1
    assert capsys.readouterr().err == (
        "error: rank 0: /proc/1/mem/x: must be read or written; got Not a directory. Give it other permissions or name "
        "another.\n"
    )
