"""What a loader must know about the models, computed in one place for every command."""

from dataclasses import replace
from typing import Any

from openkto.batches.loader import KTODataLoader
from openkto.errors import ConfigError
from openkto.models.positions import check_row_lengths, row_lengths
from openkto.report.flops import forward_work


def plan_for(loaders: list[KTODataLoader], actor: Any, *others: Any) -> None:
    """Let loaders plan for how an `Actor` runs rows: packed or padded, at what cost, and which rows not together.

    Called once the models are loaded and checked.

    Args:
        others: further actors that run the same micro-batches, such as the reference.

    Raises:
        ConfigError: the positions of one of the models do not serve the longest rows.
    """
    configs = [one.model.config for one in (actor, *others)]
    found = [row_lengths(config).apart_at for config in configs]
    apart_at = {limit for limit in found if limit is not None}
    attention_length = forward_work(actor).attention_length
    vocabulary = min(config.get_text_config().vocab_size for config in configs)
    for loader in loaders:
        longest = loader.longest
        for config in configs:
            check_row_lengths(f"the model ({config.model_type})", config, longest)
        # A pad token that only the tokenizer knows has no embedding.
        pad_token_id = loader.dataset.pad_token_id if loader.dataset.pad_token_id < vocabulary else 0
        loader.layout = layout = replace(
            loader.layout,
            packed=actor.packs,
            attention_length=attention_length,
            apart_at=tuple(sorted(limit for limit in apart_at if limit < longest)),
            pad_token_id=pad_token_id,
        )
        if layout.apart_at and layout.shared_by > 1:
            raise ConfigError(
                f"--sequence_parallel_size: leaves each rank a part of a row, and a {configs[0].model_type} with "
                f"longrope needs whole ones beyond {layout.apart_at[0]} tokens; got sequences of up to {longest} "
                f"tokens. Leave it out, or pass --max_len {layout.apart_at[0]}."
            )
