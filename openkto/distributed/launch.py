"""Starting and ending a process of a run: its rank, its device, the process group, a clean exit."""

import ipaddress
import os
import socket
from datetime import timedelta
from typing import NamedTuple

import deepspeed
import deepspeed.ops
import torch

from openkto.errors import ConfigError
from openkto.process.ranks import check_rendezvous, ranks_on_this_node, settle_ranks

# Longer than any honest wait between two collectives: one rank may be tokenising or saving.
COLLECTIVE_TIMEOUT = timedelta(hours=2)


class Place(NamedTuple):
    """Where a rank runs."""

    device: torch.device
    local_rank: int  # among the ranks of its node


def start_process() -> Place:
    """Join the process group and return where this rank runs.

    On a CPU DeepSpeed would first build a C++ op that training never uses: a minute or more, and an endless wait
    on the lock of a builder that was killed. So its list of ops is emptied there.

    Raises:
        ConfigError: the environment does not say which rank this is or where the ranks meet.
    """
    settle_ranks()
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = _take_gpu(local_rank)
    else:
        deepspeed.ops.__compatible_ops__ = {}
    _join("gloo" if device.type == "cpu" else "nccl")
    return Place(device, local_rank)


def _take_gpu(local_rank: int) -> torch.device:
    """Make this rank's GPU the current one, to torch and to DeepSpeed, which takes LOCAL_RANK for its number."""
    index = device_index(local_rank, torch.cuda.device_count())
    torch.cuda.set_device(index)
    os.environ["LOCAL_RANK"] = str(index)
    return torch.device("cuda", index)


def device_index(local_rank: int, visible: int) -> int:
    """Return the number of this rank's GPU among those that it can see.

    Raises:
        ConfigError: there is none for it.
    """
    if local_rank < visible:
        return local_rank
    if visible == 1:
        # SLURM's --gpus-per-task=1 shows each task only its own GPU.
        return 0
    raise ConfigError(
        f"the GPUs: each rank of a node needs one; got {visible} for rank {local_rank} of this node, counted from 0. "
        "Start one rank for each GPU, all of which it can see, or show each rank only its own."
    )


def _join(backend: str) -> None:
    if not torch.distributed.is_initialized():
        if os.environ["WORLD_SIZE"] == "1":
            # A store in memory: no port that another program may take.
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        else:
            check_rendezvous()
            if backend == "gloo":
                _check_own_address()
    try:
        deepspeed.init_distributed(
            dist_backend=backend, timeout=COLLECTIVE_TIMEOUT, verbose=False, auto_mpi_discovery=False
        )
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error) and "already in use" not in str(error):
            raise
        raise ConfigError(
            f"MASTER_PORT: must be free on the host of rank 0; got {os.environ['MASTER_PORT']}, which another program "
            "has, such as a second run on this machine. Pass another --master_port to deepspeed or torchrun, or export "
            "another MASTER_PORT."
        ) from error


def _check_own_address() -> None:
    """See that gloo, which tells the other nodes the address behind this host's name, tells them one that they reach.

    Raises:
        ConfigError: it would tell them this host's own loopback address, as the name has on Debian by default.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    if os.environ.get("GLOO_SOCKET_IFNAME") or (ranks_on_this_node() or world_size) >= world_size:
        return
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        address = "no address"
    if address == "no address" or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise ConfigError(
            f"this host's name: must stand for an address that the other nodes reach; got {name}, which stands for "
            f"{address}. Export GLOO_SOCKET_IFNAME with the network interface between the nodes, such as eth0."
        )


def end_process() -> None:
    """Leave the process group; a gloo process that ends without doing so sometimes aborts after all its work."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def is_first_rank() -> bool:
    """Whether this process is the one that speaks for the run; known only from the launcher's variables."""
    return int(os.environ.get("RANK", "0")) == 0


def check_computes(device: torch.device, precision: str, *, deepcompile: bool) -> None:
    """Raise a ConfigError where the device cannot compute in a dtype, or DeepSpeed cannot compile for it."""
    accelerator = deepspeed.accelerator.get_accelerator()
    supported = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    if precision != "fp32" and not supported[precision]():
        raise ConfigError(
            f"--param_dtype: the device must support {precision}; got one that does not. Pass --param_dtype fp32."
        )
    if deepcompile and device.type != "cuda":
        raise ConfigError(
            f"--deepcompile: needs a CUDA GPU, which DeepSpeed compiles for; got {device.type}. Take --torch_compile, "
            "or leave it out."
        )
