"""Starting and ending a process of a run: rank variables, the process group, a clean exit.

`deepspeed` and `torchrun` set RANK, LOCAL_RANK and WORLD_SIZE; without a launcher the process is a world of one.
"""

import os
import socket
from datetime import timedelta

import deepspeed
import deepspeed.ops
import torch

# Longer than any honest wait between two collectives: one rank may be tokenising or saving.
COLLECTIVE_TIMEOUT = timedelta(hours=2)


def start_process(backend: str | None = None) -> torch.device:
    """Join the process group and return this rank's device.

    On a CPU DeepSpeed would first build a C++ op that training never uses: a minute or more, and a wait without end
    on the lock of a builder that was killed. So its list of ops is emptied there.
    """
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(_free_port())
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(
        dist_backend=backend or ("nccl" if on_gpu else "gloo"), timeout=COLLECTIVE_TIMEOUT, verbose=False
    )
    return device


def end_process() -> None:
    """Leave the process group; a gloo process that ends without doing so sometimes aborts after all its work."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def is_first_rank() -> bool:
    """Whether this process is the one that speaks for the run; known from the launcher's variables alone."""
    return int(os.environ.get("RANK", "0")) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
