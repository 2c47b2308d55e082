"""A micro-batch's tokens shared by the ranks of a sequence-parallel group (DeepSpeed's Ulysses).

Each rank runs its slice of the packed row through all layers. For attention the ranks exchange: each gets all tokens of
some heads, and gives the results back. DeepSpeed does that (`UlyssesSPAttentionHF`), around our own attention.

DeepSpeed's engine is not told. Every rank has the gradient of its own tokens, so that those of a group add up as those
of different rows do: to the engine all ranks are data-parallel, at every ZeRO stage with one and the same scale, and
checkpoints lie as they always do. Told of it, stages 0 to 2 divide by other numbers than stage 3 does (0.19.8).

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509v2.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import Tensor

from openkto.distributed.mesh import Mesh


class SharedTokens:
    """What an `Actor` asks of the ranks that share its tokens. Every rank of the group must make the same calls."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank, self.size, self.group = mesh.part_rank, mesh.part_size, mesh.part_group
        self._by_heads: dict[tuple[int, int, int], UlyssesSPAttentionHF] = {}

    def attend(
        self, attention: Callable[..., Any], module: Any, query: Tensor, key: Tensor, *more: Any, **others: Any
    ) -> Any:
        """Return what `attention` gives for this rank's tokens, having run it on all tokens of this rank's heads.

        Args:
            attention: in the form of transformers' attention functions, of all of the group's tokens.
            query: [1, A, L, D], of this rank's tokens.
            key: [1, G, L, D], likewise; the values are as wide.
        """
        heads = query.shape[1], key.shape[1], query.shape[3]
        if heads not in self._by_heads:
            self._by_heads[heads] = UlyssesSPAttentionHF(
                attn=attention,
                batch_size=1,
                attn_head_count=heads[0],
                kv_head_count=heads[1],
                attn_head_size=heads[2],
                num_hidden_layers=1,
                process_group=self.group,
                seq_length_is_variable=True,
            )
        # It gathers these for kernels that find the rows by them; ours knows the bounds.
        others["position_ids"] = torch.zeros(1, 1, dtype=torch.int32, device=query.device)
        return self._by_heads[heads](module, query, key, *more, **others)

    def total(self, own: Tensor) -> Tensor:
        """Return the sum over the ranks. Each takes the gradient of its own part: all compute the same loss of it."""
        summed: Tensor = _Sum.apply(own, self.group)
        return summed

    def together(self, own: Tensor) -> Tensor:
        """Return all ranks' tensors one below the other, [ranks * L, ...]; each takes its own part's gradient."""
        all_of_them: Tensor = _Gather.apply(own, self.rank, self.size, self.group)
        return all_of_them


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        summed = own.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return grad_outputs[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, rank: int, size: int, group: Any) -> Tensor:
        ctx.rank, ctx.size = rank, size
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return grad_outputs[0].chunk(ctx.size)[ctx.rank], None, None, None
