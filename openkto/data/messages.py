"""Normalise chat messages: role/content or from/value, tool calls, content in parts."""

import json
import re

from openkto.config import TEMPLATE_ARGUMENTS
from openkto.data.json_files import parse_json
from openkto.data.problems import FIX_ROW, OR_SKIP, BadRow, shorten

Message = dict[str, object]

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
# Parts of content that are text, by their type; some writers give none.
TEXT_PARTS = ("text", "input_text", "output_text", None)


MESSAGE_NAMES = ({"role", "content"}, {"from", "value"})


def unpacked(value: object) -> object:
    """Return the message list that a text is the JSON of, as in a CSV cell; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[{", "{")):
        return value
    try:
        found = parse_json(value)
    except (ValueError, RecursionError):
        return value
    if isinstance(found, dict):  # one message; an object with another role is somebody's text
        is_message = str(found.get("role", found.get("from"))).strip().lower() in ROLES
        return [found] if is_message and any(names <= found.keys() for names in MESSAGE_NAMES) else value
    if not isinstance(found, list):
        return value
    is_messages = all(isinstance(m, dict) and any(names <= m.keys() for names in MESSAGE_NAMES) for m in found)
    return found if is_messages else value


def is_in_python(value: object) -> bool:
    """Return whether a text is messages in Python's notation, as pandas writes a column of lists into a CSV file."""
    if not isinstance(value, str) or re.match(r"\s*(array\()?\[?\s*\{'", value) is None:
        return False
    return any(all(f"'{name}':" in value for name in names) for names in MESSAGE_NAMES)


def read_messages(place: str, key: str, value: object) -> list[Message]:
    """Return a list of messages (or one) with `role` and `content`; further members are kept; raises BadRow."""
    members = as_list(value)
    if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
        rule, cure = f"{key} must be text or a list of messages", FIX_ROW
        if isinstance(value, str):
            rule = f"{key} must be a list of messages"
            cure = "Give messages with role and content, or a column for the prompt and one for the answer" + OR_SKIP
        raise BadRow(place, "wrong type", rule, shorten(value), cure)
    if not members:
        raise BadRow(place, "no messages", f"{key} must hold at least one message", "an empty list")
    return [_read_message(place, key, member) for member in members]


def as_list(value: object) -> object:
    """Return one message as a list of it, and a struct of lists, as Arrow keeps a Sequence, as a list of structs."""
    if not isinstance(value, dict):
        return value
    columns = {name: column for name, column in value.items() if isinstance(column, list)}
    lengths = {len(column) for column in columns.values()}
    if {"role", "from"} & columns.keys() and len(columns) == len(value) and len(lengths) == 1:
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [value]


def read_tools(place: str, value: object) -> list[object] | None:
    """Return the tools' schemas, given as a list or as its JSON text; None where there are none."""
    if value is None or value == "" or value == []:
        return None
    tools = value
    if isinstance(value, str):
        try:
            tools = parse_json(value)
        except (ValueError, RecursionError):
            tools = None
        if tools == []:
            return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(place, "tools", "tools must be a list of tool schemas, or its JSON text", shorten(value))
    return tools


def read_template_kwargs(place: str, value: object) -> dict[str, object]:
    """Return a row's own arguments for the chat template, given as an object or its JSON text."""
    if value is None or value == "":
        return {}
    kwargs = value
    if isinstance(value, str):
        try:
            kwargs = parse_json(value)
        except (ValueError, RecursionError):
            kwargs = None
    reserved = sorted(TEMPLATE_ARGUMENTS & kwargs.keys()) if isinstance(kwargs, dict) else []
    if not isinstance(kwargs, dict) or reserved:
        rule = "chat_template_kwargs must be an object of arguments that only the chat template knows"
        raise BadRow(place, "chat_template_kwargs", rule, shorten(value))
    return kwargs


def reasoning_of(message: Message) -> str:
    """Return what an assistant's message says of its reasoning outside the content, under any of its usual names."""
    names = ("reasoning_content", "thinking", "reasoning")
    return next((text for name in names if isinstance(text := message.get(name), str)), "")


def calls_of(message: Message) -> list[dict[str, object]]:
    """Return a message's tool calls, each with its name and arguments."""
    calls = message.get("tool_calls")
    found = [call.get("function", call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [call for call in found if isinstance(call, dict)]


def names_of_tools(tools: list[object] | None) -> list[str]:
    """Return the names in the tools' schemas."""
    found = [tool.get("function", tool) for tool in tools or [] if isinstance(tool, dict)]
    return [name for tool in found if isinstance(tool, dict) and isinstance(name := tool.get("name"), str)]


def with_arguments(message: Message, as_text: bool) -> Message:
    """Return a message whose tool calls' arguments are all JSON texts, or all objects where they can be."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_arguments(call, as_text) for call in calls]}


def _with_arguments(call: object, as_text: bool) -> object:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"], as_text)}
    arguments = call.get("arguments")
    if as_text and isinstance(arguments, (dict, list)):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    if not as_text and isinstance(arguments, str):
        try:
            value = parse_json(arguments)
        except (ValueError, RecursionError):
            return call
        return {**call, "arguments": value} if isinstance(value, dict) else call
    return call


def assistant(content: str) -> list[Message]:
    """Return a completion text as messages."""
    return [{"role": "assistant", "content": content}]


def trailing_assistants(messages: list[Message]) -> int:
    """Return how many assistant messages end the list."""
    count = 0
    while count < len(messages) and messages[-1 - count]["role"] == "assistant":
        count += 1
    return count


def _read_message(place: str, key: str, value: dict[str, object]) -> Message:
    message = {name: member for name, member in value.items() if member is not None}
    if "role" not in message and "from" in message:
        message = {{"from": "role", "value": "content"}.get(name, name): member for name, member in message.items()}
    if "content" not in message and isinstance(message.get("parts"), list):
        message["content"] = message.pop("parts")
    given = message.get("role", message.get("type"))
    role = ROLES.get(given.strip().lower()) if isinstance(given, str) else None
    if role is None:
        rule = f"a message's role in {key} must be one of {', '.join(ROLES)}"
        raise BadRow(place, "role", rule, shorten(given))
    message["role"] = role
    content = message.get("content")
    if isinstance(content, list):
        content = _joined_parts(content)
        message["content"] = content
    if content is None and "content" not in message and message.get("tool_calls"):
        message["content"] = ""
    elif not isinstance(content, str):
        rule = f"a message's content in {key} must be text"
        raise BadRow(place, "message content", rule, shorten(value.get("content", value.get("value"))))
    elif isinstance(given, str) and given.strip().lower() == "function_call":
        message["tool_calls"] = _tool_calls(place, content)
        message["content"] = ""
    return message


def _joined_parts(parts: list[object]) -> str | None:
    """Return the text of content given in parts; None where a part is not text."""
    texts = [_part_text(part) for part in parts]
    return "".join(text for text in texts if isinstance(text, str)) if all(isinstance(t, str) for t in texts) else None


def _part_text(part: object) -> object:
    if isinstance(part, dict) and part.get("type") in TEXT_PARTS:
        return part.get("text", part.get("value"))
    return part if isinstance(part, str) else None


def _tool_calls(place: str, content: str) -> list[object]:
    """Return LLaMA-Factory's function_call text, {"name": ..., "arguments": ...} or a list of them, as tool calls."""
    try:
        value = parse_json(content)
    except (ValueError, RecursionError):
        value = None
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        rule = "a function_call must be JSON with a name and arguments"
        raise BadRow(place, "function call", rule, shorten(content))
    return [{"type": "function", "function": call} for call in calls]
