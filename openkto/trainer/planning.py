"""What a loader must know of the models that its rows run through, said in one place for every command."""

from typing import Any

from openkto.batches.loader import KTODataLoader
from openkto.errors import ConfigError
from openkto.models.positions import check_row_lengths, row_lengths
from openkto.report.flops import forward_work


def plan_for(loaders: list[KTODataLoader], actor: Any, *others: Any) -> None:
    """Let loaders plan for how an `Actor` runs rows: packed or padded, at what cost, and which rows not together.

    Args:
        others: further actors that run the same micro-batches, such as the reference.

    Raises:
        ConfigError: the positions of one of the models do not serve the longest rows.
    """
    configs = [one.model.config for one in (actor, *others)]
    found = [row_lengths(config).apart_at for config in configs]
    apart_at = {limit for limit in found if limit is not None}
    attention_length = forward_work(actor).attention_length
    for loader in loaders:
        longest = loader.longest
        for config in configs:
            check_row_lengths(f"the model ({config.model_type})", config, longest)
        loader.packed, loader.attention_length = actor.packs, attention_length
        loader.apart_at = tuple(sorted(limit for limit in apart_at if limit < longest))
        if loader.apart_at and loader.shared_by > 1:
            raise ConfigError(
                f"--sequence_parallel_size: leaves each rank a part of a row, and a {configs[0].model_type} with "
                f"longrope needs whole ones beyond {loader.apart_at[0]} tokens; got sequences of up to {longest} "
                f"tokens. Leave it out, or pass --max_len {loader.apart_at[0]}."
            )
