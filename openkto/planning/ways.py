"""The settings that a run could have on a machine, what each takes, and which to recommend."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from openkto.models.actor import Actor
from openkto.planning.activations import RECOMPUTATION, Device, Recomputation, Shape, count_forward, count_training
from openkto.planning.memory import Memory, Reference, Sizes, Way, memory_of

Trains = Literal["full", "LoRA"]
# (ZeRO stage, optimizer states off the GPU, parameters off the GPU), the fastest first: stage 1 sends gradients once a
# step, 2 after each micro-batch, 3 gathers the parameters in each pass.
LAYOUTS = (
    (0, False, False), (1, False, False), (2, False, False), (3, False, False),
    (2, True, False), (3, True, False), (3, True, True),
    (1, True, False), (3, False, True),
)  # fmt: skip
RARE = LAYOUTS[-2:]  # looked at only where flags ask for them


@dataclass(frozen=True)
class Choice:
    """Settings with what they take."""

    trains: Trains
    way: Way
    memory: Memory

    @property
    def cost(self) -> tuple[int, ...]:
        """Sorts by what is given up for memory: all parameters, speed by offload, by recomputation, by sending more.

        A cached reference saves forwards in every epoch but the first.
        """
        options, how = self.way.options, RECOMPUTATION.index(self.way.recomputation)
        has_offload, layout = options.adam_offload or options.param_offload, LAYOUTS.index(layout_of(self.way))
        order = (layout, how) if has_offload else (how, layout)
        return (self.trains != "full", has_offload, *order, self.way.reference == "model")

    @property
    def is_sensible(self) -> bool:
        """Whether it gains anything over others on this many ranks."""
        way = self.way
        if way.options.adam_offload or way.options.param_offload:
            return True
        if way.zero_stage == 0:
            return way.precision == "fp32"  # else it holds twice the weights, under autocast
        # On one rank there is nothing to share: stage 2 lacks a copy that stage 1 has; in float32 stage 0 is best.
        return way.ranks > 1 or (way.zero_stage == 2 and way.precision != "fp32")


def layout_of(way: Way) -> tuple[int, bool, bool]:
    """Return what of a way `LAYOUTS` holds."""
    return way.zero_stage, way.options.adam_offload, way.options.param_offload


def count_sizes(
    actor: Actor,
    shapes: tuple[Shape, Shape],
    device: Device,
    *,
    reference: int,
    in_4_bits: bool = False,
    recomputation: tuple[Recomputation, ...] = RECOMPUTATION,
) -> Sizes:
    """Return the sizes of a policy on the meta device.

    Args:
        shapes: the largest micro-batches with gradient and without.
        reference: the parameters of a reference of its own.
        in_4_bits: whether the frozen weights of linear layers, the head's apart, are loaded so.
    """
    model = actor.language_model
    ends = {id(model.get_output_embeddings().weight), id(model.get_input_embeddings().weight)}
    parameters = list(actor.parameters())
    frozen = [p for p in parameters if not p.requires_grad]
    return Sizes(
        trained=tuple(p.numel() for p in parameters if p.requires_grad),
        frozen=tuple(p.numel() for p in frozen),
        reference=reference,
        training={how: count_training(actor, shapes[0], how, device) for how in recomputation},
        forward=count_forward(actor, shapes[1], device),
        in_4_bits=sum(p.numel() for p in frozen if p.dim() > 1 and id(p) not in ends) if in_4_bits else 0,
    )


def choices(
    sizes: Mapping[Trains, Sizes],
    base: Way,
    references: Mapping[Trains, tuple[Reference, ...]],
    allows: Callable[[Way], bool],
) -> list[Choice]:
    """Return all choices that the given flags leave, those of one kind beside each other.

    Args:
        base: the way that the others are variations of.
        references: by what trains.
        allows: whether the flags that are given leave a way open.
    """
    found = []
    for trains, known in sizes.items():
        for reference in references[trains]:
            for stage, adam, param in LAYOUTS:
                if (adam or param) and base.device == "cpu":
                    continue
                options = replace(base.options, adam_offload=adam, param_offload=param)
                for how in known.training:
                    way = replace(base, zero_stage=stage, reference=reference, options=options, recomputation=how)
                    if allows(way):
                        found.append(Choice(trains, way, memory_of(known, way)))
    return found


def best(found: list[Choice], room: float) -> Choice | None:
    """Return the choice that gives up least of those that fit, sensible ones first."""
    fitting = [one for one in found if one.memory.most <= room]
    return min(fitting, key=lambda one: (not one.is_sensible, one.cost), default=None)


def nearest(found: list[Choice]) -> Choice:
    """Return the choice that takes the least."""
    return min(found, key=lambda one: one.memory.most)
