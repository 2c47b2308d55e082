"""A short forward pass before training, compared with the model as it was loaded, to find unsupported models.

What is compared: two rows through the model's own code, each by itself, with the attention that goes by masks and the
rates that the model came with; and the same rows as the trainer runs them, in one micro-batch. Windows of attention are
a few tokens wide meanwhile, so that rows of twelve tokens reach beyond them.

Shapes:  B = 2 rows, T = 12 tokens of a whole row, V = vocabulary.
Units:   nats.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from openkto.errors import ConfigError
from openkto.models.kept_keys import KeptKeys
from openkto.models.packed_attention import PACKED, UnknownAttention

log = logging.getLogger(__name__)

TOKENS = 12  # of a whole row
SHARED = 5  # the first tokens of both rows are the same: what predicts them must be, too
CUT = 7  # tokens of the second row as the trainer runs it, after the first or padded to its length
WINDOW = 4


@torch.no_grad()
def check_forward(
    actor: Any, tolerance: float, place: str = "--pretrain", *, with_balancing_loss: bool = False
) -> None:
    """Compare a short forward of an `Actor` with the model's own logits.

    Where packing is `auto` and the rows of a packed forward do not stay apart, they are padded from then on. Rows that
    share their prompt in one forward, or go on after one that has run, are compared, too; where that moves them,
    prompts are not shared.

    Args:
        tolerance: nats a token.
        place: names the model in an error.
        with_balancing_loss: also see that the model has one.

    Raises:
        ConfigError: they differ by more, are not finite, or depend on the tokens that follow; or there is no balancing
            loss.
    """
    kind = type(actor.language_model).__name__
    # Uncompiled: what torch.compile makes of these shapes would be of no further use.
    with torch.compiler.set_stance("force_eager"), _narrow_windows(actor.language_model):
        theirs_BT = _own_log_probs(actor, tolerance, place)
        worst = _distance(actor, theirs_BT, with_balancing_loss)
        if not worst <= tolerance and actor.packs and actor.packing == "auto" and actor.sharers is None:
            actor.stop_packing()
            log.warning("warning: %s does not keep packed rows apart; they are padded.", kind)
            worst = _distance(actor, theirs_BT, with_balancing_loss)
        if actor.packs and actor.sharers is None and actor.model.config._attn_implementation == PACKED:
            moved = _distance(actor, theirs_BT, with_balancing_loss, **_shared_prompt(actor))
            actor.shared_differs = not (moved <= tolerance and _distance_after_prompt(actor, theirs_BT) <= tolerance)
    if not worst <= tolerance:
        raise ConfigError(
            f"{place}: the log-probabilities must follow from the model's own logits; got {worst:.3g} nats a "
            f"token between them for {kind}. It does something that OpenKTO does not know: please report "
            f"it, and {'pass --packing auto' if actor.packs else 'take another model'}."
        )


def _rows(actor: Any) -> Tensor:
    """Return the ids of two rows, [B, T], whose first tokens are the same."""
    vocabulary = actor.language_model.config.get_text_config().vocab_size
    ids_BT = torch.arange(2 * TOKENS, device=actor.language_model.device) * 7919 % vocabulary
    ids_BT = ids_BT.view(2, TOKENS)
    ids_BT[1, :SHARED] = ids_BT[0, :SHARED]
    return ids_BT


def _own_log_probs(actor: Any, tolerance: float, place: str) -> Tensor:
    """Return what the model as it was loaded gives for each token but the first of both rows: [B, T - 1] float64.

    Raises:
        ConfigError: it is not finite, or depends on the tokens that follow.
    """
    ids_BT = _rows(actor)
    with actor.as_loaded():
        logits_BTV = actor.model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
    tokens_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None]).squeeze(-1).double()
    if not bool(tokens_BT.isfinite().all()):
        raise ConfigError(
            f"{place}: the model's log-probabilities must be finite; got nan or infinity. Its weights are "
            "broken: save or download them again."
        )
    moved = float((tokens_BT[0] - tokens_BT[1])[: SHARED - 1].abs().max())
    if moved > tolerance:
        raise ConfigError(
            f"{place}: each token must be predicted from those before it; got {type(actor.language_model).__name__}, "
            f"where the tokens that follow move it by {moved:.3g} nats. Name a causal language model."
        )
    return tokens_BT


def _shared_prompt(actor: Any) -> dict[str, Tensor]:
    """Return what tells an `Actor` that the second row's first tokens run in the first one."""
    device, whole, own = actor.language_model.device, torch.arange(TOKENS), torch.arange(CUT - SHARED)
    layout = {
        "token_index": torch.cat([whole, TOKENS + SHARED + own]),
        "place_index": torch.cat([whole, whole[:SHARED], TOKENS + own]),
        "query_bounds": torch.tensor([0, TOKENS, TOKENS + len(own)], dtype=torch.int32),
        "scored_index": torch.cat([whole[1:], TOKENS + whole[1:CUT]]),
    }
    return {name: index.to(device) for name, index in layout.items()}


def _distance(actor: Any, theirs_BT: Tensor, with_balancing_loss: bool, **shared: Tensor) -> float:
    """Return by how much the log-probabilities as the trainer runs the rows differ at most, in nats a token."""
    ids_BT, theirs_B = _rows(actor), torch.stack([theirs_BT[0].sum(), theirs_BT[1, : CUT - 1].sum()])
    tokens_B = torch.tensor([TOKENS, CUT], device=ids_BT.device)
    real_BT = torch.arange(TOKENS, device=ids_BT.device) < tokens_B[:, None]
    scored_BT = real_BT.clone()
    scored_BT[:, 0] = False
    was_training = actor.training
    # Nothing may be random in training mode either; an adapter's own dropout may.
    actor.train(not actor.has_adapter)
    try:
        ours = actor(ids_BT, real_BT.long(), scored_BT, with_balancing_loss=with_balancing_loss, **shared)
    except UnknownAttention:
        return float("nan")
    finally:
        actor.train(was_training)
    if with_balancing_loss and not float(ours.balancing_loss) > 0:
        raise ConfigError(
            f"--aux_loss_coef: the experts' balancing loss must be above 0; got {float(ours.balancing_loss):g} of "
            f"{type(actor.language_model).__name__}. Leave it out."
        )
    return float(((ours.log_prob_B - theirs_B).abs() / (tokens_B - 1)).max())


def _distance_after_prompt(actor: Any, theirs_BT: Tensor) -> float:
    """Return by how much the second row differs in nats a token where its end runs after a forward of the first row."""
    ids_BT, kept = _rows(actor), KeptKeys()
    column_T, own = torch.arange(TOKENS, device=ids_BT.device), torch.arange(SHARED - 1, CUT, device=ids_BT.device)
    masks = torch.ones_like(ids_BT[:1]), column_T[None] > 0
    was_training = actor.training
    actor.train(not actor.has_adapter)
    actor(ids_BT[:1], *masks, kept_keys=kept)
    kept.start_taking()
    layout = {
        "token_index": own,
        "scored_index": own[1:],
        "place_index": torch.cat([len(own) + column_T[: SHARED - 1], column_T[: len(own)]]),
        "query_bounds": torch.tensor([0, len(own)], dtype=torch.int32, device=ids_BT.device),
    }
    masks = masks[0][:, :CUT], column_T[None, :CUT] >= SHARED
    ours = actor(ids_BT[1:, :CUT], *masks, **layout, kept_keys=kept)
    kept.close()
    actor.train(was_training)
    return float((ours.log_prob_B - theirs_BT[1, SHARED - 1 : CUT - 1].sum()).abs()) / (CUT - SHARED)


@contextlib.contextmanager
def _narrow_windows(model: PreTrainedModel) -> Iterator[None]:
    """Inside, attention that sees a window of tokens sees a few: configurations and layers hold its width."""
    configs = [model.config, model.config.get_text_config()]
    configs += [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    found = [
        (holder, name, value)
        for holder in {id(one): one for one in (*configs, *model.modules())}.values()
        for name, value in vars(holder).items()
        if "window" in name and "layers" not in name and type(value) is int and value > WINDOW
    ]
    for holder, name, _ in found:
        setattr(holder, name, WINDOW)
    try:
        yield
    finally:
        for holder, name, value in found:
            setattr(holder, name, value)
