"""How the models run rows, as far as it matters to the plan of micro-batches."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How the models run rows: what the plan of micro-batches follows besides the user's limits."""

    packed: bool = False  # laid end to end, so that padding costs nothing
    attention_length: float = math.inf  # at which a row's attention costs as much as all else in the model
    apart_at: tuple[int, ...] = ()  # tokens, rising: rows up to such a length and longer ones share no micro-batch
    shared_by: int = 1  # ranks that run each micro-batch together, each an equal part of its tokens
    larger_without_gradient: int = 1  # factor for the micro-batches of no_grad forwards
    measured_tokens: int | None = None  # in a rank's part of a micro-batch, where that was measured
    pad_token_id: int | None = None  # None is the data set's own
    shares_prompts: bool = False  # in forwards without gradient
    shares_matched: bool = False  # also in those with gradient: a prompt's completions then share its gradient, too
    shares_pairs: bool = False  # also between matched and mismatched pairs, where a model runs both so
    # Let the policy's mismatched pairs go on after the prompts of its matched rows, whose graphs are held meanwhile: of
    # one micro-batch a rank always, of several up to this many tokens a rank; None does not.
    held_tokens: int | None = None
