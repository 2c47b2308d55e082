"""Show rows as the model will see them: decoded ids, the scored part marked."""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]
Cut = Callable[[list[int], list[int], list[bool]], tuple[list[int], list[int], list[bool]]]

OPEN, CLOSE = "\u27e6", "\u27e7"
GREEN, RED, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[0m"


def first_of_each_class(labels: NDArray[np.bool_], n: int) -> NDArray[np.int64]:
    """Return the places of the first n rows of each class."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:n] for label in (True, False)]))


def preview_rows(rows: Iterable[Row], tokenizer: Any, cut: Cut, max_len: int, has_colour: bool) -> str:
    """Return rows with number, label, lengths and whether they are cut."""
    return "\n\n".join(_describe(row, tokenizer, cut, max_len, has_colour) for row in rows)


def _describe(row: Row, tokenizer: Any, cut: Cut, max_len: int, has_colour: bool) -> str:
    prompt_ids, completion_ids, mask = cut(row["prompt_ids"], row["completion_ids"], row["completion_mask"])
    dropped = len(row["prompt_ids"]) + len(row["completion_ids"]) - len(prompt_ids) - len(completion_ids)
    head = (
        f"row {row['row']}: {'desirable' if row['label'] else 'undesirable'}, prompt {len(prompt_ids)} tokens,"
        f" completion {len(completion_ids)} tokens, {sum(mask)} of them scored"
    )
    if row["weight"] != 1:
        head += f", weight {row['weight']:g}"
    if dropped:
        head += f", cut by {dropped} to max_len {max_len}"
    opened, closed = OPEN, CLOSE
    if has_colour:
        opened, closed = (GREEN if row["label"] else RED) + OPEN, CLOSE + PLAIN
    marked = [(False, len(prompt_ids)), *((is_scored, len(list(run))) for is_scored, run in groupby(mask))]
    body = ""
    ids = prompt_ids + completion_ids
    shown = ""
    end = 0
    for is_scored, length in marked:
        end += length
        # Decoded from the start each time: a tokenizer may drop the space before the first token that it is given.
        text = _decode(tokenizer, ids[:end])
        body += f"{opened}{text[len(shown) :]}{closed}" if is_scored else text[len(shown) :]
        shown = text
    return f"{head}\n{body}"


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
