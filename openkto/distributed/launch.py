"""Starting and ending a process of a run: rank variables, the process group, a clean exit.

`deepspeed` and `torchrun` set RANK, LOCAL_RANK and WORLD_SIZE; without a launcher the process is a world of one.
"""

import os
from datetime import timedelta

import deepspeed
import deepspeed.ops
import torch

# Longer than any honest wait between two collectives: one rank may be tokenising or saving.
COLLECTIVE_TIMEOUT = timedelta(hours=2)


def start_process() -> torch.device:
    """Join the process group and return this rank's device.

    On a CPU DeepSpeed would first build a C++ op that training never uses: a minute or more, and a wait without end
    on the lock of a builder that was killed. So its list of ops is emptied there.
    """
    is_alone = "RANK" not in os.environ
    if is_alone:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        deepspeed.ops.__compatible_ops__ = {}
    backend = "nccl" if on_gpu else "gloo"
    if is_alone:
        # A store in memory: no port that another program may take.
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    deepspeed.init_distributed(
        dist_backend=backend, timeout=COLLECTIVE_TIMEOUT, verbose=False, auto_mpi_discovery=False
    )
    return device


def end_process() -> None:
    """Leave the process group; a gloo process that ends without doing so sometimes aborts after all its work."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def is_first_rank() -> bool:
    """Whether this process is the one that speaks for the run; known from the launcher's variables alone."""
    return int(os.environ.get("RANK", "0")) == 0
