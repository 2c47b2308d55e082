"""The shipped job script on a real SLURM of two nodes: what is interrupted ends like what is not, to the last bit."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.records import records
from tests.slurm.cluster import Cluster, NoClusterError, slurm_cluster
from tests.text_rows import write_model, write_rows

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "configs/slurm/train_kto.sbatch"
STEPS = 100
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    try:
        with slurm_cluster(tmp_path_factory.mktemp("cluster")) as running:
            yield running
    except NoClusterError as error:
        pytest.skip(f"no SLURM here: {error}")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a model and rows; all nodes see it."""
    folder = tmp_path_factory.mktemp("run")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl", 200)
    return folder


class Job:
    """A submitted job of the shipped script."""

    def __init__(self, cluster: Cluster, place: Path, name: str, *more: str) -> None:
        self.cluster, self.out, self.log = cluster, place / name, place / f"{name}.log"
        # Two nodes without GPUs, one task each; everything else as the script says.
        options = [
            "--parsable",
            "--ntasks-per-node=1",
            "--gpus-per-node=1",
            "--cpus-per-task=1",
            f"--output={self.log}",
        ]
        flags = {
            "pretrain": "model", "dataset": "rows.jsonl", "save_path": name, "param_dtype": "fp32", "zero_stage": "2",
            "train_batch_size": "16", "micro_train_batch_size": "4", "max_len": "128", "max_steps": str(STEPS),
            "learning_rate": "1e-3", "lr_warmup_ratio": "0.1", "save_steps": "1000",
        }  # fmt: skip
        words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
        environment = ENVIRONMENT | {"OPENKTO_CACHE": f"{place}/cache"}
        self.number = cluster.run("sbatch", *options, str(SCRIPT), *words, *more, cwd=place, env=environment).strip()

    def steps(self) -> int:
        """Return how many steps have been made, over all starts."""
        file = self.out / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return sum(json.loads(line)["kind"] == "train" for line in lines if line.endswith("\n"))

    def wait(self, is_so: Callable[[], bool], seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while not is_so():
            text = self.log.read_text() if self.log.exists() else ""
            assert time.monotonic() < until, f"{self.cluster.job(self.number)}\n{text}"
            time.sleep(0.1)

    def wait_for_state(self, state: str) -> None:
        self.wait(lambda: self.cluster.job(self.number)["JobState"] == state)

    def interrupt(self, *command: str) -> int:
        """Interrupt the job in the middle and return how many steps it had made when it waits in the queue again."""
        self.wait(lambda: self.steps() >= 5)
        self.cluster.run(*command, self.number)
        self.wait_for_state("PENDING")
        return self.steps()


@pytest.fixture(scope="module")
def whole(cluster, place):
    """Return the job that nothing interrupts, at its end."""
    job = Job(cluster, place, "whole")
    job.wait_for_state("COMPLETED")
    assert job.steps() == STEPS
    return job


@pytest.mark.parametrize("command", [("scontrol", "requeue"), ("scancel", "--signal=USR1")], ids=["preempted", "USR1"])
def test_an_interrupted_job_resumes_and_ends_as_if_it_had_not_been(cluster, place, whole, command):
    job = Job(cluster, place, f"{command[0]}ed")
    done = job.interrupt(*command)
    assert 5 <= done < STEPS
    job.wait_for_state("COMPLETED")
    assert cluster.job(job.number)["Restarts"] == "1"
    log = job.log.read_text()
    assert "task 0: Exited with exit code 75" in log
    assert f"{done} of {STEPS} steps are done" in log
    assert records(job.out) == records(whole.out)
    weights = [folder / "model.safetensors" for folder in (job.out, whole.out)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_job_whose_command_is_wrong_ends_with_its_status_and_does_not_come_back(cluster, place):
    job = Job(cluster, place, "wrong", "--learning_rat", "1")
    job.wait_for_state("FAILED")
    assert cluster.job(job.number)["ExitCode"] == "2:0"
    assert cluster.job(job.number)["Restarts"] == "0"
    assert "--learning_rate" in job.log.read_text()


def test_tasks_know_their_ranks_and_where_to_meet(cluster):
    code = (
        "import os; from openkto.process.ranks import settle_ranks; settle_ranks();"
        "print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_SIZE', 'MASTER_ADDR')))"
    )
    printed = cluster.run("srun", "--nodes=2", "--ntasks=3", sys.executable, "-c", code, env=ENVIRONMENT)
    assert sorted(printed.splitlines()) == ["0 0 3 2 node1", "1 1 3 2 node1", "2 0 3 1 node1"]


def test_a_library_user_under_srun_needs_no_variable(cluster):
    code = (
        "from openkto.distributed.strategy import DeepspeedStrategy; s = DeepspeedStrategy(); s.setup_distributed();"
        "print(s.rank, s.local_rank, s.world_size, s.all_reduce([s.rank + 1.0]).tolist()); s.barrier()"
    )
    printed = cluster.run("srun", "--nodes=2", "--ntasks=2", sys.executable, "-c", code, env=ENVIRONMENT)
    assert sorted(printed.splitlines()) == ["0 0 2 [3.0]", "1 0 2 [3.0]"]
