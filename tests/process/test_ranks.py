"""Which rank a process is: from a launcher's variables, from SLURM's, or none."""

import os
import stat

import pytest

from openkto.commands.run import run
from openkto.commands.train import wait_for_the_others
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.errors import ConfigError
from openkto.process.ranks import check_rendezvous, ranks_on_this_node, settle_ranks
from tests.ranks import run_ranks

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# As SLURM 22.05 sets them in task 3 of `srun --nodes 2 --ntasks-per-node 2`.
TASK = {
    "SLURM_JOB_ID": "4021", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_GTIDS": "2,3", "SLURM_NTASKS": "4",
}  # fmt: skip


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Return a function that sets the variables given, and no other of ranks; what the code sets is taken back."""
    # A copy, so that what the code itself sets goes with it.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in [name for name in os.environ if name in NAMES or name.startswith("SLURM_")]:
        del os.environ[name]
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    os.environ["PATH"] = f"{scontrol.parent}:{os.environ['PATH']}"
    return lambda **variables: os.environ.update(variables)


def ranks():
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_a_task_of_srun_is_a_rank(environment):
    environment(**TASK)
    settle_ranks()
    assert ranks() == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "node1",
        "MASTER_PORT": str(12000 + 211),  # 40211 = 10 * job + step, modulo 20000
    }  # fmt: skip
    assert ranks_on_this_node() == 2


def test_the_job_scripts_meeting_point_and_a_launchers_rank_win(environment):
    environment(**TASK, MASTER_ADDR="10.0.0.7", MASTER_PORT="29500", WORLD_SIZE="16")
    settle_ranks()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ["WORLD_SIZE"]) == (
        "10.0.0.7",
        "29500",
        "4",
    )
    environment(RANK="9", WORLD_SIZE="16", LOCAL_RANK="1")
    settle_ranks()
    assert os.environ["RANK"] == "9"


@pytest.mark.parametrize("changes", [{"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_STEP_NUM_TASKS": None}])
def test_a_batch_shell_and_an_interactive_shell_are_a_world_of_one(environment, changes):
    environment(**{name: value for name, value in (TASK | changes).items() if value})
    settle_ranks()
    assert ranks() == {}


def test_one_node_needs_no_scontrol(environment):
    environment(**TASK | {"SLURM_STEP_NODELIST": "gpu-17"}, PATH="/nowhere")
    settle_ranks()
    assert os.environ["MASTER_ADDR"] == "gpu-17"


def test_several_nodes_without_scontrol_are_one_sentence(environment):
    environment(**TASK, PATH="/nowhere")
    with pytest.raises(
        ConfigError, match=r"^MASTER_ADDR: must be set where `scontrol show hostnames node\[1-2\]` fails"
    ):
        settle_ranks()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"RANK": "0"}, "got RANK=0 without WORLD_SIZE and LOCAL_RANK"),
        ({"WORLD_SIZE": "8"}, "got WORLD_SIZE=8 without RANK and LOCAL_RANK"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "got RANK=1, WORLD_SIZE=2 without LOCAL_RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "got RANK=2, LOCAL_RANK=0, WORLD_SIZE=2"),
        ({"RANK": "first", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK must be a whole number; got 'first'"),
    ],
)
def test_half_an_environment_is_one_sentence(environment, given, sentence, capsys):
    environment(**given)
    assert run(lambda argv: None, []) == 2
    (error,) = capsys.readouterr().err.splitlines()[-1:]
    assert error.startswith("error: the environment: ")
    assert sentence in error


def test_ranks_without_a_meeting_point_are_one_sentence(environment):
    environment(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="node1")
    with pytest.raises(ConfigError, match="got no MASTER_PORT"):
        check_rendezvous()


def test_the_command_knows_its_rank_before_it_says_anything(environment, caplog):
    environment(**TASK)
    seen = []
    assert run(lambda argv: seen.append(os.environ["RANK"]), []) == 0
    assert seen == ["3"]


def stop_while_the_other_dies(folder):
    strategy = DeepspeedStrategy(param_dtype="fp32")
    strategy.setup_distributed()
    if strategy.rank == 1:
        os._exit(9)
    wait_for_the_others(strategy)
    (folder / "stopped").touch()


def test_a_rank_that_dies_while_the_others_stop_does_not_change_how_they_end(tmp_path):
    with pytest.raises(AssertionError, match="a rank failed"):
        run_ranks(stop_while_the_other_dies, 2, tmp_path, tmp_path)
    assert (tmp_path / "stopped").exists()
