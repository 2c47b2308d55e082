"""What a loader must know about the models, computed in one place for every command."""

import logging
from dataclasses import replace
from typing import Any

from torch import nn

from openkto.batches.loader import KTODataLoader
from openkto.errors import ConfigError
from openkto.models.packed_attention import PACKED
from openkto.models.positions import check_row_lengths, row_lengths
from openkto.report.flops import forward_work

log = logging.getLogger(__name__)


def plan_for(
    loaders: list[KTODataLoader],
    actor: Any,
    *others: Any,
    reference_runs: bool = False,
    by_token: bool = False,
    with_balancing_loss: bool = False,
    precision: str = "fp32",
) -> None:
    """Let loaders plan for how an `Actor` runs rows: packed or padded, at what cost, and which rows not together.

    Called once the models are loaded and checked.

    Args:
        others: further actors that run the same micro-batches, such as the reference.
        reference_runs: whether a reference runs the batches that the loaders make, for training or evaluation.
        by_token: whether a loss needs more of it, and of the policy, than a number a row.
        with_balancing_loss: whether a loss asks the policy's routers how evenly they spread the rows' tokens.
        precision: in which the models compute.

    Raises:
        ConfigError: the positions of one of the models do not serve the longest rows, or prompts are to be shared and
            cannot be.
    """
    configs = [one.model.config for one in (actor, *others)]
    found = [row_lengths(config).apart_at for config in configs]
    apart_at = {limit for limit in found if limit is not None}
    attention_length = forward_work(actor).attention_length
    shares_prompts = _shares_prompts(loaders, [actor, *others])
    is_exact = pairs_run_together(actor.share_prompts, precision)
    has_dropout = _has_dropout(actor)
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
            shares_prompts=shares_prompts,
            # In training the policy runs matched rows with gradient; in evaluation it runs all pairs, too.
            shares_pairs=shares_prompts and not by_token and ((reference_runs and is_exact) or not loader.shuffle),
            # A reference in the loop runs the same micro-batches, and so has the same round-off.
            shares_matched=shares_prompts and (reference_runs or is_exact) and not (with_balancing_loss or has_dropout),
        )
        if layout.apart_at and layout.shared_by > 1:
            raise ConfigError(
                f"--sequence_parallel_size: leaves each rank a part of a row, and a {configs[0].model_type} with "
                f"longrope needs whole ones beyond {layout.apart_at[0]} tokens; got sequences of up to {longest} "
                f"tokens. Leave it out, or pass --max_len {layout.apart_at[0]}."
            )


def pairs_run_together(share_prompts: str, precision: str) -> bool:
    """Return whether log-ratios may come from two layouts in training: a step's, and another one of the reference's.

    Then a reference in the loop runs matched and mismatched pairs together, if it shares prompts. In half precision the
    round-off of another layout would show in log-ratios that are exactly 0 before the first update, so there `auto`
    leaves the reference the policy's micro-batches.
    """
    return precision == "fp32" or share_prompts == "on"


def _shares_prompts(loaders: list[KTODataLoader], actors: list[Any]) -> bool:
    """Return whether forwards without gradient run a prompt once for all of its completions in a batch, and say so.

    Raises:
        ConfigError: they are asked to, and cannot.
    """
    choice = actors[0].share_prompts
    if choice == "off":
        return False
    reason = next((why for why in (_reason_against(loaders, actor) for actor in actors) if why is not None), None)
    if reason is None:
        level = logging.INFO if choice == "on" else logging.DEBUG
        log.log(level, "prompts: each runs once for all its completions, without gradient (--share_prompts %s)", choice)
        return True
    if choice == "on":
        raise ConfigError(f"--share_prompts: on needs packed rows that may see another row's; got {reason}. Take auto.")
    log.info("prompts: each runs again with each completion (--share_prompts auto): %s", reason)
    return False


def _reason_against(loaders: list[KTODataLoader], actor: Any) -> str | None:
    limit = row_lengths(actor.model.config).apart_at
    if limit is not None and any(loader.longest > limit for loader in loaders):
        return f"longrope, whose positions depend on a row's length beyond {limit} tokens"
    return reason_against_sharing(actor)


def reason_against_sharing(actor: Any) -> str | None:
    """Return why rows of this `Actor` cannot attend to prompts that ran in other rows, if so."""
    attention = actor.language_model.config._attn_implementation
    if not actor.packs:
        return "padded rows"
    if actor.sharers is not None:
        return "ranks that share a row's tokens (--sequence_parallel_size)"
    if attention != PACKED:
        return f"--attn_implementation {attention}, where OpenKTO's own attention is needed"
    if actor.shared_differs:
        return f"a {type(actor.language_model).__name__}, where it changes the log-probabilities"
    return None


def reason_against_reuse(actor: Any, zero_stage: int, *, is_compiled: bool) -> str | None:
    """Return why mismatched pairs of this `Actor`, which can share, cannot run after its matched rows, if so."""
    if zero_stage == 3:
        return "ZeRO 3, where each backward must come right after its forward"
    if is_compiled:
        return "compiled layers (--torch_compile, --deepcompile)"
    if _has_dropout(actor):
        return "--lora_dropout, which is only for matched rows"
    return None


def _has_dropout(actor: Any) -> bool:
    """Return whether an adapter drops something at random in training, of each row something else."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in actor.modules())
