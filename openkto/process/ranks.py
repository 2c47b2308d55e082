"""Which rank this process is, only from its environment: known before anything heavy is imported.

`deepspeed` and `torchrun` set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Plain `srun` does not: there a
task is a rank, and the five follow from the step's variables. Without either the process is a world of one.

Source: https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES".
"""

import os
import re
import subprocess

from openkto.errors import ConfigError

# What gloo, NCCL and the store say where the other end of a connection ended, or did not come within the time limit.
LOST = re.compile(
    r"gloo.*(closed|reset by peer|broken pipe|timed out|refused)|connection was likely closed|remote process exit"
    r"|NCCL.*(timeout|remote|system) ?error|socket has timed out|wait timeout after",
    re.IGNORECASE | re.DOTALL,
)

LAUNCHERS = "Start through deepspeed, torchrun or srun, which set them all, or unset them for one process"


def settle_ranks() -> None:
    """Set the rank variables from SLURM's where no launcher has, and see that they go together.

    Raises:
        ConfigError: they do not, or the host of rank 0 cannot be found.
    """
    # The shells of sbatch, salloc and `srun --pty` are no step, or a step of one task: the process is then the only
    # rank.
    if "RANK" not in os.environ and _number("SLURM_STEP_NUM_TASKS", "1") > 1:
        _take_from_slurm()
    given = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ]
    if "RANK" not in given and os.environ.get("WORLD_SIZE", "1") == "1":
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in given]
    if missing:
        got = ", ".join(f"{name}={os.environ[name]}" for name in given)
        raise ConfigError(
            "the environment: RANK, WORLD_SIZE and LOCAL_RANK must be set together; "
            f"got {got} without {' and '.join(missing)}. {LAUNCHERS}."
        )
    rank, world_size, local_rank = (_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not (0 <= rank < world_size and 0 <= local_rank < world_size):
        raise ConfigError(
            "the environment: RANK and LOCAL_RANK must be from 0 to WORLD_SIZE - 1; got "
            f"RANK={rank}, LOCAL_RANK={local_rank}, WORLD_SIZE={world_size}. {LAUNCHERS}."
        )


def check_rendezvous() -> None:
    """See that the ranks know where to meet.

    Raises:
        ConfigError: they do not.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            "the environment: MASTER_ADDR and MASTER_PORT must name the host of rank 0 and a free port there; got "
            f"no {' and no '.join(missing)}. {LAUNCHERS}."
        )


def loss_of_a_rank(error: BaseException) -> str | None:
    """Return a sentence for a collective's error that says no more than that another rank is gone; None for others."""
    link: BaseException | None = error
    while link is not None and LOST.search(f"{type(link).__name__}: {link}") is None:
        link = link.__cause__ or link.__context__
    if link is None:
        return None
    return (
        "another rank is gone, or did not answer in time, and this one cannot go on without it. That rank's own last "
        "lines say why; where there are none, it was killed: for want of memory, by a scheduler, or with its node. "
        "Start the same command again with --load_checkpoint: it resumes from the newest checkpoint."
    )


def ranks_on_this_node() -> int | None:
    """Return how many ranks the launcher has started on this node, where it says so."""
    said = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")
    return int(said) if said else None


def _take_from_slurm() -> None:
    os.environ.update(
        RANK=os.environ["SLURM_PROCID"],
        WORLD_SIZE=os.environ["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=os.environ["SLURM_LOCALID"],
        LOCAL_SIZE=str(len(os.environ["SLURM_GTIDS"].split(","))),
    )
    if not os.environ.get("MASTER_ADDR"):
        os.environ["MASTER_ADDR"] = _first_host(os.environ["SLURM_STEP_NODELIST"])
    if not os.environ.get("MASTER_PORT"):
        # Below the ports that Linux gives to outgoing connections; another step of the job gets another one.
        steps = 10 * _number("SLURM_JOB_ID") + _number("SLURM_STEP_ID")
        os.environ["MASTER_PORT"] = str(12000 + steps % 20000)


def _first_host(node_list: str) -> str:
    """Return the first host of a list in SLURM's short form, such as node[1-4,7]."""
    if not set("[,") & set(node_list):
        return node_list
    command = ["scontrol", "show", "hostnames", node_list]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise ConfigError(
            f"MASTER_ADDR: must be set where `{' '.join(command)}` fails, as in a container; got none ({error}). "
            'Export it in the job script: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | '
            "head -n 1)."
        ) from error


def _number(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment: {name} must be a whole number; got {text!r}. {LAUNCHERS}.") from None
