"""The one rule that fits a prompt and a completion into max_len, for matched rows and mismatched pairs alike.

Lengths are in tokens. A cut never leaves 0 completion tokens nor more than max_len, and adds nothing (no EOS).
"""

from typing import Literal, NamedTuple, TypeVar

import numpy as np

Truncation = Literal["completion", "prompt", "drop"]
Lengths = TypeVar("Lengths", int, np.ndarray)

# BOS, one prompt token and one completion token: with less, "prompt" truncation could not keep its promise.
SMALLEST_MAX_LEN = 3


class Limit(NamedTuple):
    """How long a row may be, in tokens, and what is cut of longer ones."""

    max_len: int
    truncation: Truncation


def kept_lengths(
    prompt_length: Lengths,
    completion_length: Lengths,
    *,
    max_len: int,
    truncation: Truncation,
    has_bos: Lengths | bool = False,
) -> tuple[Lengths, Lengths]:
    """Return (prompt tokens, completion tokens) after the cut; numbers or arrays of them.

    "completion" and "drop" keep the prompt and cut the completion's end; "prompt" cuts the prompt's start as far as BOS
    and one further token, and only then the completion's end. The total is min(prompt + completion, max_len) in every
    mode, so it does not depend on `has_bos`. A completion length under 1 says that the prompt leaves no room.
    """
    kept_prompt = prompt_length
    if truncation == "prompt":
        smallest = np.minimum(prompt_length, 1 + np.asarray(has_bos, dtype=np.int64))
        kept_prompt = np.clip(max_len - completion_length, smallest, prompt_length)
    return kept_prompt, np.minimum(completion_length, max_len - kept_prompt)


def is_left_out(
    prompt_lengths: np.ndarray, completion_lengths: np.ndarray, *, max_len: int, truncation: Truncation
) -> np.ndarray:
    """Return whether each matched row is left out: too long at all for "drop", no room for an answer otherwise."""
    if truncation == "drop":
        return prompt_lengths + completion_lengths > max_len
    _, kept = kept_lengths(prompt_lengths, completion_lengths, max_len=max_len, truncation=truncation)
    return kept < 1


def cut(
    prompt_ids: list[int],
    completion_ids: list[int],
    completion_mask: list[bool],
    *,
    max_len: int,
    truncation: Truncation,
    bos_token_id: int | None,
) -> tuple[list[int], list[int], list[bool]]:
    """Return the ids and mask of a matched or mismatched pair cut to max_len.

    The prompt must be one that its own row kept (`is_left_out`), so that it leaves room for one completion token.
    """
    assert max_len >= SMALLEST_MAX_LEN, f"max_len is at least {SMALLEST_MAX_LEN}"
    if len(prompt_ids) + len(completion_ids) <= max_len:
        return prompt_ids, completion_ids, completion_mask
    has_bos = bool(prompt_ids) and prompt_ids[0] == bos_token_id
    kept_prompt, kept_completion = kept_lengths(
        len(prompt_ids), len(completion_ids), max_len=max_len, truncation=truncation, has_bos=has_bos
    )
    assert kept_completion >= 1, "a prompt that leaves no room for a completion token was left out before"
    dropped = len(prompt_ids) - int(kept_prompt)
    head = 1 if has_bos else 0
    prompt_ids = prompt_ids[:head] + prompt_ids[head + dropped :]
    return prompt_ids, completion_ids[: int(kept_completion)], completion_mask[: int(kept_completion)]
