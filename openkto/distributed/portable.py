"""Parameters out of a DeepSpeed checkpoint of any ZeRO stage and number of ranks, into an engine of any other.

DeepSpeed's universal format covers a change of ranks but not of stage, and at stage 3 it restores a wrong Adam step and
a wrong weight decay without an error (0.19.8). The files hold all that is needed, so they are read where they lie, a
parameter at a time: nothing is converted and nothing is written.

Layout of the files (0.19.8): stage 0 keeps whole tensors. Stages 1 and 2 keep one flat tensor per parameter group and
rank, and where each parameter lies in it; a parameter may go over into the next rank's. Stage 3 keeps one flat tensor
per sub-group and rank with an equal slice of each parameter, the last one padded. Where ranks share the weights
(tensor parallelism) there is such a set of files for each part of them, told apart by `mp_rank`.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from openkto.distributed.engine_files import read_file
from openkto.distributed.optimizer import is_cpu_adam
from openkto.distributed.tensor_parallel import Split, split_of
from openkto.errors import CheckpointError

MASTER = "param"
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's
KEYS = (MASTER, *MOMENTS)
# Where a stage-0 checkpoint of ours says which parameters its optimizer counts, in order.
NAMES = "openkto_optimizer_names"
# Where a checkpoint says which parameters are cut: their names with the dimension and the whole shape.
CUTS = "openkto_cuts"

# Flat float32 tensors by key: a master copy and its moments.
Flat = dict[str, Tensor]


class Pieces(NamedTuple):
    """A parameter, or a part of it, as the files hold it: its master copy and moments, each in flat pieces in order."""

    numel: int
    by_key: dict[str, list[Tensor]]

    def slice(self, key: str, start: int, length: int) -> Tensor:
        """Return `length` elements from `start` on, or those that there are; nothing else is read from the disk."""
        stop, end, parts = min(start + length, self.numel), 0, []
        for piece in self.by_key[key]:
            begin, end = end, end + piece.numel()
            if max(begin, start) < min(end, stop):
                parts.append(piece[max(begin, start) - begin : min(end, stop) - begin])
        return torch.cat(parts) if parts else torch.empty(0)


class Saved(NamedTuple):
    """A parameter as a checkpoint holds it: in as many parts as ranks shared the weights, or whole."""

    parts: list[Pieces]
    dim: int = 0  # which is cut
    shape: tuple[int, ...] | None = None  # of the whole; None where there is one part

    @property
    def numel(self) -> int:
        """The elements of the whole."""
        return sum(part.numel for part in self.parts)

    def whole(self, key: str) -> Tensor:
        """Return the whole, flat."""
        flats = [part.slice(key, 0, part.numel) for part in self.parts]
        if self.shape is None or len(flats) == 1:
            return flats[0]
        widths = [*self.shape]
        widths[self.dim] //= len(flats)
        return torch.cat([flat.view(widths) for flat in flats], dim=self.dim).reshape(-1)

    def part(self, split: Split | None) -> Pieces:
        """Return what a rank keeps of the parameter, which is cut so now, or the whole."""
        if split is None:
            if len(self.parts) == 1:
                return self.parts[0]
            return Pieces(self.numel, {key: [self.whole(key)] for key in KEYS})
        if len(self.parts) == split.mesh.part_size:
            return self.parts[split.mesh.part_rank]
        own = {key: [split.own_part(self.whole(key)).reshape(-1)] for key in KEYS}
        return Pieces(own[MASTER][0].numel(), own)


def client_state(engine: Any) -> dict[str, Any]:
    """Return what DeepSpeed is to keep in its files for `read_parameters`."""
    splits = {name: split_of(parameter) for name, parameter in engine.module.named_parameters()}
    cuts = {name: [split.dim, list(split.shape)] for name, split in splits.items() if split is not None}
    return {NAMES: optimizer_names(engine), CUTS: cuts}


def optimizer_names(engine: Any) -> list[str]:
    """Return the trained parameters' names in the order in which a stage-0 optimizer counts them."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    groups = engine.optimizer.param_groups if engine.zero_optimization_stage() == 0 else []
    return [names[id(parameter)] for group in groups for parameter in group["params"] if id(parameter) in names]


# ---- out of the files ----------------------------------------------------------------------------------------------


def read_parameters(folder: Path) -> dict[str, Saved]:
    """Return the trained parameters by name; their tensors stay on the disk until they are touched.

    Raises:
        CheckpointError: the folder holds no DeepSpeed checkpoint with an optimizer, or one that another program cut.
    """
    names = [re.search(r"mp_rank_(\d+)_", path.name) for path in folder.glob("*.pt")]
    parts = sorted({name[1] for name in names if name is not None})
    by_part = [_read_part(folder, part) for part in parts or ["00"]]
    cuts: dict[str, Any] = _by_rank(folder, f"*mp_rank_{parts[0]}_model_states.pt")[0].get(CUTS, {}) if parts else {}
    if len(parts) > 1 and not cuts:
        raise CheckpointError(
            f"{folder}: must say how its weights are cut for {len(parts)} ranks; got a checkpoint of another program. "
            "Name one of OpenKTO's."
        )
    found: dict[str, Saved] = {}
    for name, first in by_part[0].items():
        if name in cuts:
            dim, shape = cuts[name]
            found[name] = Saved([own[name] for own in by_part], dim, tuple(shape))
        else:
            found[name] = Saved([first])
    return found


def _read_part(folder: Path, part: str) -> dict[str, Pieces]:
    """Return the parameters of the ranks with one part of the weights."""
    models = _by_rank(folder, f"*mp_rank_{part}_model_states.pt")
    states = [found["optimizer_state_dict"] for found in _by_rank(folder, f"*mp_rank_{part}_optim_states.pt")]
    if models and models[0].get("optimizer") and NAMES in models[0]:
        return _stage_0(models[0])
    if not models or not states:
        raise CheckpointError(
            f"{folder}: must hold a DeepSpeed checkpoint with its optimizer; got a folder without. Name another."
        )
    shapes = models[0]["param_shapes"]
    return _stage_3(states, shapes) if "fp32_flat_groups" in states[0] else _stages_1_and_2(states)


def read_masters(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the flat master copy of each trained parameter, or of all there are where ranks share none.

    Raises:
        CheckpointError: the folder holds no DeepSpeed checkpoint.
    """
    models = _by_rank(folder, "*_model_states.pt")
    if models and models[0].get("optimizer") and not models[0].get(CUTS):  # stage 0, of whatever program
        yield from ((name, tensor.reshape(-1)) for name, tensor in models[0]["module"].items())
        return
    for name, saved in read_parameters(folder).items():
        yield name, saved.whole(MASTER)


def _by_rank(folder: Path, pattern: str) -> list[Any]:
    def rank_of(path: Path) -> int:
        found = re.search(r"pp_rank_(\d+)_", path.name)
        return int(found[1]) if found else 0

    files = sorted(folder.glob(pattern), key=rank_of)
    strange = [path for path in files if not path.is_file()]
    if strange:
        raise CheckpointError(
            f"{strange[0]}: must be a file; got a folder, a pipe or a device. Name another checkpoint."
        )
    return [read_file(path) for path in files]


def _stage_0(model: dict[str, Any]) -> dict[str, Pieces]:
    found = {}
    for i, name in enumerate(model[NAMES]):
        flat = _with_moments(model["module"][name].view(-1), model["optimizer"]["state"], i)
        found[name] = Pieces(flat[MASTER].numel(), {key: [value] for key, value in flat.items()})
    return found


def _stages_1_and_2(states: list[Any]) -> dict[str, Pieces]:
    pieces: dict[str, dict[str, list[Tensor]]] = {}
    for state in states:
        for i, master in enumerate(state["single_partition_of_fp32_groups"]):
            flat = _with_moments(master, state["base_optimizer_state"]["state"], i)
            for name, place in state["param_slice_mappings"][i].items():
                own = pieces.setdefault(name, {key: [] for key in KEYS})
                for key, value in flat.items():
                    own[key].append(value.narrow(0, place.start, place.numel))
    return {name: Pieces(sum(len(piece) for piece in own[MASTER]), own) for name, own in pieces.items()}


def _stage_3(states: list[Any], shapes: list[dict[str, torch.Size]]) -> dict[str, Pieces]:
    found = {}
    for i, names in enumerate(shapes):
        flats = [
            _with_moments(state["fp32_flat_groups"][i], state["optimizer_state_dict"]["state"], i) for state in states
        ]
        start = 0
        for name, shape in names.items():
            length = math.ceil(shape.numel() / len(states))
            by_key = {key: [flat[key].narrow(0, start, length) for flat in flats] for key in KEYS}
            found[name] = Pieces(shape.numel(), by_key)
            start += length
    return found


def _with_moments(master: Tensor, states: dict[int, Any], i: int) -> Flat:
    """Return a flat master with its moments, which do not exist before the first update."""
    moments = states.get(i) or dict.fromkeys(MOMENTS, torch.zeros_like(master))
    return {MASTER: master, **{key: moments[key].view(-1) for key in MOMENTS}}


# ---- into an engine -------------------------------------------------------------------------------------------------


class Slice(NamedTuple):
    """What a rank keeps of a parameter: flat tensors by key, and where they begin in the whole, or in its part."""

    name: str
    kept: Flat
    start: int


def load_parameters(engine: Any, saved: dict[str, Saved], updates: int) -> None:
    """Give an engine the masters and moments of a checkpoint, each rank its own slices; all ranks must call it.

    Args:
        updates: how many the optimizer has made; Adam corrects its moments by it.

    Raises:
        CheckpointError: the checkpoint holds other parameters than those that are trained.
    """
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    others = sorted(trained.keys() ^ saved.keys())
    if others:
        raise CheckpointError(
            f"the checkpoint: must hold the parameters that are trained; got others, such as {others[0]}. Start with "
            "the same model and settings."
        )
    stage = engine.zero_optimization_stage()
    slices = {0: _slices_0, 1: _slices_1_and_2, 2: _slices_1_and_2, 3: _slices_3}[stage]
    for name, kept, start in slices(engine, trained, updates):
        own = saved[name].part(split_of(trained[name]))
        for key, flat in kept.items():
            value = own.slice(key, start, flat.numel())
            flat[: value.numel()].copy_(value)  # stage 3 pads the last rank's slice
    optimizer = engine.optimizer
    if stage in (1, 2):
        optimizer.update_lp_params()
    elif stage == 3:
        optimizer.checkpoint_event_prologue()
        optimizer._rigid_load_state_dict(optimizer.state_dict())  # takes the model's own parameters from the masters
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.checkpoint_event_epilogue()


def _slices_0(engine: Any, trained: dict[str, nn.Parameter], updates: int) -> Iterator[Slice]:
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            engine.optimizer.state[parameter] = _fresh_state(parameter, group, updates, engine.optimizer)
    for name, parameter in trained.items():
        moments = engine.optimizer.state[parameter]
        kept = {MASTER: parameter.data, **{key: moments[key] for key in MOMENTS}}
        yield Slice(name, {key: value.view(-1) for key, value in kept.items()}, 0)


def _slices_1_and_2(engine: Any, trained: dict[str, Any], updates: int) -> Iterator[Slice]:
    inner = engine.optimizer.optimizer
    masters = [group["params"][0] for group in inner.param_groups]
    for master, group in zip(masters, inner.param_groups, strict=True):
        inner.state[master] = _fresh_state(master, group, updates, inner)
    for name, parameter in trained.items():
        place = parameter._hp_mapping
        if place is None:  # it lies on other ranks
            continue
        master = masters[place.param_group_index]
        flat = {MASTER: master.data, **{key: inner.state[master][key] for key in MOMENTS}}
        where = place.hp_fragment_address
        kept = {key: value.narrow(0, where.start, where.numel) for key, value in flat.items()}
        yield Slice(name, kept, place.lp_fragment_address.start)


def _slices_3(engine: Any, trained: dict[str, Any], updates: int) -> Iterator[Slice]:
    optimizer = engine.optimizer
    inner = optimizer.optimizer
    for i, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        group = inner.param_groups[optimizer.sub_group_to_group_id[i]]
        inner.state[master] = _fresh_state(master, group, updates, inner)
    for name, parameter in trained.items():
        i, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
        master = optimizer.fp32_partitioned_groups_flat[i]
        flat = {MASTER: master.data, **{key: inner.state[master][key] for key in MOMENTS}}
        kept = {key: value.narrow(0, offset, length) for key, value in flat.items()}
        yield Slice(name, kept, length * torch.distributed.get_rank(parameter.ds_process_group))


def _fresh_state(parameter: Tensor, group: dict[str, Any], updates: int, optimizer: Optimizer) -> dict[str, Any]:
    """Return Adam's state of one of its tensors, as the optimizer makes it, after a number of updates; moments 0."""
    device = parameter.device if group.get("fused") or group.get("capturable") else None
    step = updates if is_cpu_adam(optimizer) else torch.tensor(float(updates), dtype=torch.float32, device=device)
    return {"step": step, **{key: torch.zeros_like(parameter.data) for key in MOMENTS}}
