"""Prompts for the policy to answer: some of an evaluation set's, or those of a file."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from openkto.data import truncation as rule
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.formats import OTHER_PROMPT_NAMES, PROMPT_NAMES
from openkto.data.messages import read_messages, trailing_assistants
from openkto.data.problems import BadRow, Findings, data_error, shorten
from openkto.data.row import RowMaker, RowSettings, field_names, read_field
from openkto.data.sources import find_source
from openkto.data.text_files import DataFile, text_lines
from openkto.data.tokenize import RowTokenizer
from openkto.errors import DataError

log = logging.getLogger(__name__)

PROMPT_KEYS = ("prompt", "messages", "conversations", *PROMPT_NAMES, *OTHER_PROMPT_NAMES)
ANY_ANSWER = "x"  # stands for the answer that a prompt of a file has not, where a row is read


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model gets it; the completion and label are those of a row that has it."""

    source: str  # the evaluation set, or the file
    ids: list[int]
    completion_ids: tuple[int, ...] = ()
    label: bool | None = None


def prompts_of_set(name: str, rows: UnpairedPreferenceDataset, count: int) -> list[Prompt]:
    """Return at most `count` different prompts, spread evenly over a set in its order, each with its first row."""
    _, first = np.unique(rows.prompt_keys, return_index=True)
    first.sort()
    if count < len(first):
        first = first[np.arange(count) * len(first) // count]
    found = [rows[int(i)] for i in first]
    return [Prompt(name, row["prompt_ids"], tuple(row["completion_ids"]), bool(row["label"])) for row in found]


def prompts_of_file(path: str, tokenizer: Any, settings: RowSettings, template_date: str | None) -> list[Prompt]:
    """Return the prompts of a file, read and rendered as those of rows.

    Raises DataError where there is none, or one that cannot be read.
    """
    reader = RowTokenizer(tokenizer, template_date=template_date)
    maker = RowMaker(replace(settings, weight_key=None), reader.template)
    prompts = []
    try:
        for place, record, prompt in _read_prompts(path, settings.input_key):
            result = reader.tokenize([maker.make(place, record, prompt, ANY_ANSWER, label=True)])[0]
            if isinstance(result, BadRow):
                raise result
            prompts.append(Prompt(Path(path).name, result.prompt_ids))
    except BadRow as bad:
        raise DataError(bad.when_skipped()) from None  # no row is skipped here
    if not prompts:
        raise data_error(path, "must hold at least one prompt", "none", "Add prompts, or leave --sample_prompts out.")
    return prompts


def _read_prompts(path: str, input_key: str | None) -> Iterator[tuple[str, dict[str, object], object]]:
    """Yield (place, record, prompt)."""
    file = DataFile(Path(path).expanduser(), path)
    if file.container == ".txt":
        if not file.path.is_file():
            raise data_error(path, "must be an existing file", "no such file", "Correct the path.")
        for number, line in text_lines(file):
            if line.strip():
                yield f"{path}:{number}", {}, line.rstrip("\r\n")
        return
    for _, place, record in find_source(path, "train").records(Findings()):
        if isinstance(record, BadRow):
            raise record
        if isinstance(record, str):
            yield place, {}, record
        elif isinstance(record, dict):
            yield place, record, _prompt_of(place, record, input_key)
        else:
            raise BadRow(place, "not an object", "a prompt must be text, or a field of an object", shorten(record))


def _prompt_of(place: str, record: dict[str, object], input_key: str | None) -> object:
    """Return the prompt in a record, which may be a whole row."""
    key = input_key or next((name for name in PROMPT_KEYS if name in record), None)
    if key is None:
        cure = "Name the field with the prompts with --input_key."
        raise BadRow(place, "missing field", "must have a field prompt", f"the fields {field_names(record)}", cure)
    prompt = read_field(place, record, key)
    if key == "instruction" and isinstance(prompt, str) and isinstance(record.get("input"), str) and record["input"]:
        return f"{prompt}\n{record['input']}"
    if key in ("messages", "conversations"):
        messages = read_messages(place, key, prompt)
        return messages[: len(messages) - trailing_assistants(messages)]
    return prompt


def fit_prompts(
    prompts: list[Prompt], *, max_len: int, max_new_tokens: int, truncation: rule.Truncation, bos_id: int | None
) -> tuple[list[Prompt], int]:
    """Return the prompts that leave room for an answer, and how many tokens of it all of them leave.

    A prompt must leave `max_new_tokens`, or half of `max_len` where that is less. One that does not is cut at its start
    with truncation "prompt", and left out with the others.

    Raises DataError where none is left.
    """
    room = min(max_new_tokens, max_len // 2)
    if truncation == "prompt":
        answer = [0] * room
        cuts = [
            rule.cut(p.ids, answer, [True] * room, max_len=max_len, truncation=truncation, bos_token_id=bos_id)[0]
            for p in prompts
        ]
        prompts = [replace(prompt, ids=ids) for prompt, ids in zip(prompts, cuts, strict=True)]
    kept = [prompt for prompt in prompts if len(prompt.ids) + room <= max_len]
    if not kept:
        raise data_error(
            "--num_samples, --sample_prompts",
            f"a prompt must leave {room} tokens of --max_len {max_len} for its answer",
            f"{len(prompts)} prompts of {min(len(p.ids) for p in prompts)} tokens or more",
            "Raise --max_len, lower --sample_max_new_tokens, or take --truncation prompt.",
        )
    if len(kept) < len(prompts):
        log.warning(
            "warning: samples: %d of %d prompts are left out, which leave less than %d tokens of --max_len %d for an "
            "answer.",
            len(prompts) - len(kept),
            len(prompts),
            room,
            max_len,
        )
    return kept, min(max_new_tokens, max_len - max(len(prompt.ids) for prompt in kept))
