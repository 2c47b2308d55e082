"""Turn rendered rows into ids: the boundary between prompt and completion, the end of the turn, the mask.

The prompt's ids are those that the model gets at generation time. Where the tokenizer merges over the boundary,
training on the merged whole would teach a token that cannot come there, so the completion is tokenised by itself.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from openkto.data.notes import Note
from openkto.data.problems import BadRow, data_error, shorten
from openkto.data.render import Rendered, Renderer
from openkto.data.row import Row
from openkto.data.template import ChatTemplate, special_tokens

# Texts put before a completion to tokenise it as a continuation; the first that leaves it intact is used. The end of
# text is tried before them, since nothing merges with a special token.
ANCHORS = ("\n", "a", ".", "1", "\u00e9")


@dataclass(frozen=True)
class TokenizedRow:
    """The ids of a row, uncut, and what was special about it."""

    prompt_ids: list[int]
    completion_ids: list[int]
    completion_mask: list[bool]
    is_merged: bool
    template_differs: bool
    has_special_markup: bool
    notes: tuple[Note, ...] = ()


class RowTokenizer:
    """Tokenises rows in batches with one tokenizer.

    Args:
        end_token_ids: where generation stops besides the tokenizer's EOS, such as generation_config's eos_token_id.
        template_date: the day that a chat template which prints today's date is to print; None is today.
    """

    def __init__(self, tokenizer: Any, *, end_token_ids: Sequence[int] = (), template_date: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, template_date)
        self._renderer = Renderer(tokenizer, self.template)
        self._eos: int | None = tokenizer.eos_token_id
        self._bos: int | None = tokenizer.bos_token_id
        self._suffix = _added_suffix(tokenizer)
        special = special_tokens(tokenizer)
        markup = {text for text in special.values() if text}
        self._markup = re.compile("|".join(re.escape(text) for text in sorted(markup, key=len, reverse=True)))
        self._has_markup = bool(markup)
        self._special_ids = special.keys() - ({self._bos, tokenizer.unk_token_id} - {self._eos})
        self._end_ids = {*end_token_ids, *(self.template.end_ids if self.template.exists else ())} | (
            set() if self._eos is None else {self._eos}
        )
        # Without generation_config any special token that a template closes an answer with is taken to end it.
        self._ends_with_any = not end_token_ids
        eos_anchor = (tokenizer.eos_token,) if tokenizer.eos_token else ()
        self._anchors = [(text, self._encode([text], is_raw=False)[0]) for text in (*eos_anchor, *ANCHORS)]
        self._spaces: dict[int, bool] = {}

    def tokenize(self, rows: list[Row]) -> list[TokenizedRow | BadRow]:
        """Return each row's tokens, or what is wrong with it, in order."""
        results: list[TokenizedRow | BadRow | None] = [None] * len(rows)
        groups: dict[bool, list[tuple[int, Rendered]]] = {True: [], False: []}
        for index, row in enumerate(rows):
            try:
                rendered = self._renderer.render(row)
                groups[rendered.is_chat].append((index, rendered))
            except BadRow as bad:
                results[index] = bad
        for is_chat, group in groups.items():
            for (index, _), result in zip(group, self._tokenize_group(group, is_raw=not is_chat), strict=True):
                results[index] = result
        return [result for result in results if result is not None]

    def _tokenize_group(self, group: list[tuple[int, Rendered]], is_raw: bool) -> Iterable[TokenizedRow | BadRow]:
        texts = [rendered for _, rendered in group]
        prompts = self._encode([rendered.prompt for rendered in texts], is_raw)
        wholes = self._encode([rendered.whole for rendered in texts], is_raw)
        is_merged = [whole[: len(prompt)] != prompt for prompt, whole in zip(prompts, wholes, strict=True)]
        merged = [index for index, flag in enumerate(is_merged) if flag]
        continuations = self._continuations(
            [texts[i] for i in merged], [prompts[i] for i in merged], [wholes[i] for i in merged]
        )
        alone = dict(zip(merged, continuations, strict=True))
        for index, rendered in enumerate(texts):
            anchor = ""
            completion: list[int] | None = wholes[index][len(prompts[index]) :]
            if is_merged[index]:
                completion, anchor = alone[index]
            try:
                yield self._finish(rendered, prompts[index], completion, anchor, is_merged[index])
            except BadRow as bad:
                yield bad

    def _finish(
        self, rendered: Rendered, prompt_ids: list[int], completion_ids: list[int] | None, anchor: str, is_merged: bool
    ) -> TokenizedRow:
        """End the completion with its end of turn, make its mask, and check the row."""
        place = rendered.row.place
        text = rendered.whole[len(rendered.prompt) :]
        if completion_ids is None:
            rule = "the completion must be one that the tokenizer can continue the prompt with"
            raise BadRow(place, "tokenizer", rule, shorten(text))
        if not prompt_ids:
            rule = "the prompt must have at least one token, which the first completion token follows"
            raise BadRow(place, "empty prompt", rule, shorten(rendered.prompt))
        if not completion_ids:
            raise BadRow(place, "empty completion", "the completion must have at least one token", shorten(text))
        if None in prompt_ids or None in completion_ids:
            rule = "the tokenizer must have an id for every part of the text"
            raise BadRow(place, "tokenizer", rule, f"None among the ids of {shorten(text)}")
        mask = [True] * len(completion_ids)
        if rendered.spans:
            mask = self._assistant_mask(rendered, completion_ids, anchor, is_merged)
        kept = self._end_of_turn(completion_ids, rendered.is_chat)
        if kept is not None:
            completion_ids, mask = completion_ids[:kept], mask[:kept]
        elif self._eos is None:
            raise data_error(
                place,
                "a completion must end with an end-of-text token",
                f"a tokenizer without one, {self._tokenizer.name_or_path or 'unnamed'}",
                "Set eos_token in the tokenizer's configuration.",
            )
        else:
            completion_ids, mask = [*completion_ids, self._eos], [*mask, True]
        if all(self._says_nothing(token_id) for token_id in completion_ids[:-1]):
            rule = "the completion must say something before its end of turn"
            raise BadRow(place, "empty completion", rule, shorten(text))
        return TokenizedRow(
            prompt_ids,
            completion_ids,
            mask,
            is_merged,
            rendered.template_differs,
            self._has_user_markup(rendered.row),
            (*rendered.row.notes, *rendered.notes),
        )

    def _encode(self, texts: list[str], is_raw: bool) -> list[list[int]]:
        """Return the ids of texts as generation would get them: raw text with special tokens, templates without."""
        if not texts:
            return []
        batch = self._tokenizer(
            texts,
            add_special_tokens=is_raw,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        for index, ids in enumerate(batch):
            if is_raw and self._suffix and ids[-len(self._suffix) :] == self._suffix:
                ids = ids[: -len(self._suffix)]
            while len(ids) > 1 and ids[0] == self._bos and ids[1] == self._bos:
                ids = ids[1:]
            batch[index] = ids
        return batch

    def _continuations(
        self, texts: list[Rendered], prompts: list[list[int]], wholes: list[list[int]]
    ) -> list[tuple[list[int] | None, str]]:
        """Return each completion's ids as a continuation, and the anchor that gave them; None where none did."""
        found: list[tuple[list[int] | None, str]] = [(None, "")] * len(texts)
        pending = list(range(len(texts)))
        for anchor, anchor_ids in self._anchors:
            batch = self._encode([anchor + texts[i].whole[len(texts[i].prompt) :] for i in pending], is_raw=False)
            for i, ids in zip(pending, batch, strict=True):
                rest = ids[len(anchor_ids) :]
                # A dummy-prefix space, or a merge with the anchor, shows in the text.
                if ids[: len(anchor_ids)] == anchor_ids and self._decode(prompts[i] + rest) == self._decode(wholes[i]):
                    found[i] = (rest, anchor)
            pending = [i for i in pending if found[i][0] is None]
        return found

    def _assistant_mask(
        self, rendered: Rendered, completion_ids: list[int], anchor: str, is_merged: bool
    ) -> list[bool]:
        """Return which ids of a completion of several messages the assistant wrote, each turn up to its end token."""
        if not self._tokenizer.is_fast:
            raise data_error(
                rendered.row.place,
                "a completion of several messages needs a fast tokenizer, which knows where each token stands",
                f"{type(self._tokenizer).__name__}",
                "Leave --disable_fast_tokenizer out, or give completions of one message.",
            )
        text, shift = rendered.whole, 0
        if is_merged:
            text, shift = anchor + rendered.whole[len(rendered.prompt) :], len(rendered.prompt) - len(anchor)
        offsets = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, padding=False, truncation=False, verbose=False
        )["offset_mapping"][-len(completion_ids) :]
        mask = [False] * len(completion_ids)
        for start, end in rendered.spans:
            turn = [i for i, (s, e) in enumerate(offsets) if s + shift < end and max(e, s + 1) + shift > start]
            kept = self._end_of_turn([completion_ids[i] for i in turn], is_chat=True)
            for i in turn[:kept]:
                mask[i] = True
            if kept is None and turn:
                self._hand_over(completion_ids, mask, turn[-1] + 1)
        return mask

    def _hand_over(self, ids: list[int], mask: list[bool], start: int) -> None:
        """Score the token that ends a turn although it belongs to what follows, as where the next role's is EOS."""
        for i in range(start, len(ids)):
            if ids[i] in self._end_ids:
                mask[start : i + 1] = [True] * (i + 1 - start)
            if ids[i] in self._end_ids or not self._says_nothing(ids[i]):
                return

    def _end_of_turn(self, ids: list[int], is_chat: bool) -> int | None:
        """Return how many ids there are up to the first end-of-turn token behind all that is said; else None."""
        said = len(ids)
        while said > 0 and self._says_nothing(ids[said - 1]):
            said -= 1
        closing = ids[said:]
        ends = [i for i, token_id in enumerate(closing) if token_id in self._end_ids]
        if ends:
            return said + ends[0] + 1
        if is_chat and self._ends_with_any:
            special = [i for i, token_id in enumerate(closing) if token_id in self._special_ids]
            return said + special[-1] + 1 if special else None
        return None

    def _says_nothing(self, token_id: int) -> bool:
        """Return whether a token is whitespace or closes a turn."""
        return token_id in self._end_ids or token_id in self._special_ids or self._is_space(token_id)

    def _is_space(self, token_id: int) -> bool:
        if token_id not in self._spaces:
            self._spaces[token_id] = not self._decode([token_id]).strip()
        return self._spaces[token_id]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _has_user_markup(self, row: Row) -> bool:
        """Return whether a user's text holds the markup of a special token; an end of text that ends it is meant."""
        if not self._has_markup:
            return False
        texts = []
        for part in (row.prompt, row.completion):
            texts += [part] if isinstance(part, str) else [str(message["content"]) for message in part]
        if self._tokenizer.eos_token:
            texts[-1] = texts[-1].rstrip().removesuffix(self._tokenizer.eos_token)
        return any(self._markup.search(text) for text in texts)


def choose_pad_token(tokenizer: Any) -> tuple[int, str]:
    """Return the id for padding and where it comes from; no token is ever added, so no embedding is resized.

    Attention masks come from lengths, so any id serves.
    """
    for name in ("pad_token", "unk_token", "eos_token"):
        token_id = {
            "pad_token": tokenizer.pad_token_id,
            "unk_token": tokenizer.unk_token_id,
            "eos_token": tokenizer.eos_token_id,
        }[name]
        if token_id is not None:
            return token_id, name
    return 0, "the id 0"


def _added_suffix(tokenizer: Any) -> list[int]:
    """Return the ids that the tokenizer itself appends to a text, such as an EOS: generation continues without them."""
    with_special = tokenizer("a", add_special_tokens=True)["input_ids"]
    without = tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(with_special) - len(without) + 1):
        if without and with_special[start : start + len(without)] == without:
            return with_special[start + len(without) :]
    return []
