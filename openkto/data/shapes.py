"""The shapes of the rows that feedback tools export: a table to extend. docs/feedback_tools.md says how to export them.

A path's `*` stands for the members of a list or object: all of them must say the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from openkto.data.fields import find

PROMPT_FIELDS = ("prompt", "question", "instruction", "input", "query", "text", "messages", "chat")
ANSWER_FIELDS = ("response", "completion", "answer", "output", "generation", "reply")


@dataclass(frozen=True)
class Shape:
    """One tool's export. Where several paths are given, the first that a record has is read.

    Args:
        needs: what tells the shape; all must be there, and may be null.
        unfold: brings a record that no path can express into the fields that the paths name.
    """

    name: str
    kind: Literal["unpaired", "conversation", "pairs"]
    needs: tuple[str, ...]
    prompt: tuple[str, ...] = ()
    completion: tuple[str, ...] = ()
    label: tuple[str, ...] = ()
    rejected: str = ""
    tools: str = "tools"
    unfold: Callable[[dict[str, object]], dict[str, object]] | None = None

    def first(self, paths: tuple[str, ...], records: Sequence[dict[str, object]]) -> str | None:
        """Return the first of the paths that one of the records has, else the first."""
        plain = [self.plain(record) for record in records]
        return next((path for path in paths for record in plain if find(record, path)), paths[0] if paths else None)

    def plain(self, record: dict[str, object]) -> dict[str, object]:
        """Return the record in which the paths are looked up."""
        tools = find(record, self.tools)
        plain = record if self.unfold is None else self.unfold(record)
        return {**plain, "tools": tools[0]} if tools else plain


def shape_of(record: dict[str, object]) -> Shape | None:
    """Return the shape of a record; None where it has none of these."""
    return next((shape for shape in SHAPES if all(find(record, path) for path in shape.needs)), None)


def _open_webui_thread(record: dict[str, object]) -> dict[str, object]:
    """Return the messages from the start of the chat to the rated one, which Open WebUI keeps as a tree."""
    tree, step, rating = (
        next(iter(find(record, path)), None)
        for path in ("snapshot.chat.chat.history.messages", "meta.message_id", "data.rating")
    )
    thread: list[object] = []
    while isinstance(tree, dict) and isinstance(step, str) and len(thread) < len(tree):
        message = tree.get(step)
        if not isinstance(message, dict):
            break
        thread.append({name: message.get(name) for name in ("role", "content")})
        step = message.get("parentId")
    return {"messages": thread[::-1], "rating": rating}


SHAPES = (
    Shape(
        "Open WebUI's feedback export",
        "conversation",
        needs=("snapshot.chat.chat.history.messages", "meta.message_id", "data"),
        prompt=("messages",),
        label=("rating",),
        unfold=_open_webui_thread,
    ),
    Shape(
        "Langfuse's traces or observations",
        "unpaired",
        needs=("input", "output", "scores"),
        prompt=("input.messages", "input.prompt", "input.question", "input.query", "input.input", "input"),
        completion=("output.output", "output.answer", "output.response", "output"),
        label=("scores.*.value",),
        tools="input.tools",
    ),
    Shape(
        "LangSmith's runs",
        "unpaired",
        needs=("inputs", "outputs", "feedback_stats"),
        prompt=(*(f"inputs.{name}" for name in PROMPT_FIELDS), "inputs.*"),
        completion=(*(f"outputs.{name}" for name in ANSWER_FIELDS), "outputs.*"),
        label=("feedback_stats.*.avg",),
    ),
    Shape(
        "Label Studio's tasks",
        "unpaired",
        needs=("data", "annotations"),
        prompt=tuple(f"data.{name}" for name in PROMPT_FIELDS),
        completion=tuple(f"data.{name}" for name in ANSWER_FIELDS),
        label=("annotations.*.result.*.value.choices.*", "annotations.*.result.*.value.rating"),
    ),
    Shape(
        "Argilla's records",
        "unpaired",
        needs=("fields", "responses"),
        prompt=tuple(f"fields.{name}" for name in PROMPT_FIELDS),
        completion=tuple(f"fields.{name}" for name in ANSWER_FIELDS),
        label=("responses.*.*.value",),
    ),
    Shape(
        "OpenAI's preference pairs",
        "pairs",
        needs=("input", "preferred_output", "non_preferred_output"),
        prompt=("input.messages", "input"),
        completion=("preferred_output",),
        rejected="non_preferred_output",
        tools="input.tools",
    ),
    Shape(
        "LLaMA-Factory's pairs of dialogues",
        "pairs",
        needs=("chosen_messages", "rejected_messages"),
        completion=("chosen_messages",),
        rejected="rejected_messages",
    ),
)
