"""Which ranks hold different rows, and which share the same rows to compute them together.

Besides data parallelism a run uses tensor parallelism (ranks share weights) or sequence parallelism (tokens), not both.
The ranks that share rows are neighbours: rank = data_rank * part_size + part_rank, so they are on one node first.
"""

from typing import Any, Literal, NamedTuple

import deepspeed
import torch.distributed as dist
from deepspeed.utils import groups

from openkto.errors import ConfigError

Cut = Literal["weights", "tokens"]


class Mesh(NamedTuple):
    """This rank's place among all."""

    data_rank: int = 0  # among those that hold different rows
    data_size: int = 1
    data_group: Any = None  # None is all ranks
    part_rank: int = 0  # among those that share these rows
    part_size: int = 1
    part_group: Any = None  # None where nobody shares
    cut: Cut | None = None


def make_mesh(tensor_parallel_size: int, sequence_parallel_size: int) -> Mesh:
    """Return this rank's place, having made the groups; all ranks must call it, after they have joined.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = max(tensor_parallel_size, sequence_parallel_size)
    if size == 1:
        return Mesh(data_rank=rank, data_size=world_size)
    flag = "--tensor_parallel_size" if tensor_parallel_size > 1 else "--sequence_parallel_size"
    if world_size % size:
        raise ConfigError(f"{flag}: must divide the number of ranks, {world_size}; got {size}. Change one of the two.")
    place = {"data_rank": rank // size, "data_size": world_size // size, "part_rank": rank % size, "part_size": size}
    if tensor_parallel_size > 1:
        # DeepSpeed's own groups, which its optimizers and layers take.
        deepspeed.set_autotp_mode(training=True)
        groups._init_tp_mesh_device(tensor_parallel_size)
        data_group, part_group = groups.get_data_parallel_group(), groups.get_tensor_model_parallel_group()
        return Mesh(**place, data_group=data_group, part_group=part_group, cut="weights")
    data_groups = [dist.new_group(list(range(part, world_size, size))) for part in range(size)]
    part_groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
    own = {"data_group": data_groups[place["part_rank"]], "part_group": part_groups[place["data_rank"]]}
    return Mesh(**place, **own, cut="tokens")
