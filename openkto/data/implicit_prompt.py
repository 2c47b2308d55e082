"""Find the prompt of a pair that has none: what both completions begin with."""

from collections.abc import Sequence

from openkto.data.formats import TURN_MARKER
from openkto.data.messages import read_messages, trailing_assistants
from openkto.data.problems import BadRow, shorten


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many items (characters, messages) two sequences have in common at their start."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


def implicit_prompt(place: str, chosen: object, rejected: object) -> tuple[object, object, object]:
    """Return (prompt, chosen, rejected) of a pair that holds its prompt in both completions; raises BadRow."""
    rule = "chosen and rejected must begin with the same prompt and then differ"
    if isinstance(chosen, str) and isinstance(rejected, str):
        end = _common_text(chosen, rejected)
        if end == 0 or chosen == rejected:
            raise BadRow(place, "no common prompt", rule, f"{shorten(chosen, 40)} and {shorten(rejected, 40)}")
        return chosen[:end], chosen[end:], rejected[end:]
    if isinstance(chosen, list) and isinstance(rejected, list):
        answers = read_messages(place, "chosen", chosen), read_messages(place, "rejected", rejected)
        end = common_length(*answers)
        end -= trailing_assistants(answers[0][:end])
        if end == 0 or answers[0] == answers[1]:
            raise BadRow(place, "no common prompt", rule, f"{shorten(chosen, 40)} and {shorten(rejected, 40)}")
        return answers[0][:end], answers[0][end:], answers[1][end:]
    rule = "chosen and rejected without a prompt field must both be texts or both be message lists"
    raise BadRow(place, "wrong type", rule, f"{shorten(chosen, 40)} and {shorten(rejected, 40)}")


def _common_text(chosen: str, rejected: str) -> int:
    """Return where the common prompt of two texts ends: after a turn marker, else before a word's whitespace."""
    marker = chosen.rfind(TURN_MARKER)
    common = chosen[: common_length(chosen, rejected)]
    if marker >= 0 and marker == rejected.rfind(TURN_MARKER) and marker + len(TURN_MARKER) <= len(common):
        return marker + len(TURN_MARKER)
    for end in range(len(common), 0, -1):
        if not common[end - 1].isspace() and all(
            text[end : end + 1].isspace() and text[end:].strip() for text in (chosen, rejected)
        ):
            return end
    return 0


def repeated_prompt(place: str, prompt: str, chosen: object, rejected: object) -> tuple[object, object, object]:
    """Return the pair whose message lists repeat the text prompt as their last common user message; else as it is."""
    try:
        messages, *answers = implicit_prompt(place, chosen, rejected)
    except BadRow:
        return prompt, chosen, rejected
    assert isinstance(messages, list), "message lists have a prompt of messages"
    is_same = messages[-1]["role"] == "user" and messages[-1]["content"] == prompt
    return (messages, answers[0], answers[1]) if is_same else (prompt, chosen, rejected)
