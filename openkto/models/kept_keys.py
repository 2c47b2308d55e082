"""What attention saw of a forward's tokens, kept for a second forward whose rows go on after prompts of the first.

A token's key and value depend on nothing that comes after it. So where rows with the same prompts have just run,
completions to them can run alone: their attention gets the prompts' keys and values from there.

Shapes:  P = tokens that run, Q = tokens that have run in the first forward, G = key and value heads, D = a head's size.
"""

from collections import deque
from typing import Literal

import torch
from torch import Tensor


class KeptKeys:
    """Keys and values, rotated, without gradient, of each call of attention in a forward.

    The first forward gives them and the second one takes them, layer by layer, in the same order. A layer that
    checkpointing runs again in a backward pass finds this closed and does neither.
    """

    def __init__(self) -> None:
        self.layers: deque[tuple[Tensor, Tensor]] = deque()
        self.phase: Literal["giving", "taking", "closed"] = "giving"

    def __eq__(self, other: object) -> bool:
        # DeepSpeed compares what the ranks of a tensor-parallel group give to their first forward.
        return isinstance(other, KeptKeys) and not self.layers and not other.layers

    def attend_to(self, key_PGD: Tensor, value_PGD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a forward's tokens may attend to: theirs and, in the second one, those kept.

        Returns:
            [P, G, D] each; in the second forward [P + Q, G, D].
        """
        if self.phase == "giving":
            # Without checkpointing the graph holds them anyway.
            self.layers.append((key_PGD.detach(), value_PGD.detach()))
        elif self.phase == "taking":
            kept_key_QGD, kept_value_QGD = self.layers.popleft()
            return torch.cat([key_PGD, kept_key_QGD]), torch.cat([value_PGD, kept_value_QGD])
        return key_PGD, value_PGD

    def start_taking(self) -> None:
        """Let the next forward take what the last one gave."""
        assert self.phase == "giving", "one forward gives, the next one takes"
        self.phase = "taking"

    def drop(self) -> None:
        """End the first forward without a second one."""
        self.layers.clear()
        self.phase = "closed"

    def close(self) -> None:
        """End both; all of it has been taken."""
        assert not self.layers, "both forwards run the same layers"
        self.phase = "closed"
