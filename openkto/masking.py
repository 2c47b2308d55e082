"""Leaves out of a text what must not be shared: the user and the query's values of an address, and keys of the Hub.

Whatever a command says or writes down about its settings goes through `masked`: errors, the log, run.yaml, checkpoints,
trackers, pages. What is left of an address says where something lies, and opens nothing.
"""

import re
from typing import Any

MASK = "***"
HTTP = ("http://", "https://")
PLAIN_VALUES = ("true", "false", "0", "1")  # of a query, such as ?download=true

SHORTEST_SECRET = 4  # what is shorter is a part of many words

_ADDRESS = re.compile(r"\w[\w+.-]*://[^\s\"'<>]*[^\s\"'<>:,.;)]")
# The user of a host; a password may hold a slash that was not escaped, but what is only digits is a port.
_USER = re.compile(r"(?P<scheme>\w[\w+.-]*)://(?P<user>[^/?#\s]*|[^/\s\[\]]*:(?!\d*(?:[/?#]|$))(?:(?!://)\S)*?)@")
_WITH_CONTAINER = ("abfs", "abfss", "adl", "wasb", "wasbs")  # where a name before the @ is a part of the place
_HUB_KEY = re.compile(r"\bhf_[A-Za-z]{30,}")


def masked(text: str) -> str:
    """Return a text with *** in the place of the user and the query's values of each address in it."""
    if "://" in text:
        text = _ADDRESS.sub(lambda found: _masked_query(found[0]), _without_user(text, f"{MASK}@"))
    return _HUB_KEY.sub(MASK, text)


def masked_for(address: str, text: str) -> str:
    """Return what a library says of an address, without the parts of it that are secret wherever they stand."""
    users = [found["user"] for found in _USER.finditer(address)]
    values = re.findall(r"=([^&;#]+)", address)
    for secret in [*users, *(user.partition(":")[2] for user in users), *values]:
        if len(secret) >= SHORTEST_SECRET:
            text = text.replace(secret, MASK)
    return masked(text)


def masked_value(value: Any) -> Any:
    """Return a setting's value with its text, or each of its texts, masked.

    A text without a space is one address, whatever stands in it: in a longer text a quote would end it.
    """
    if isinstance(value, str):
        is_address = "://" in value and not value.startswith("{") and not re.search(r"\s", value)
        return masked(_masked_query(_without_user(value, f"{MASK}@")) if is_address else value)
    return [masked_value(item) for item in value] if isinstance(value, list) else value


def is_masked(text: str) -> bool:
    """Return whether something was left out of an address in the text."""
    return "://" in text and re.search(r"//\*\*\*@|[?#&;=]\*\*\*", text) is not None


def name_of_address(address: str) -> str:
    """Return what the rows of an address are called: it without a user, and of http without the query."""
    name = _without_user(address, "")
    return re.sub(r"[?#].*", "", name) if name.startswith(HTTP) else name


def _without_user(text: str, instead: str) -> str:
    def shown(found: re.Match[str]) -> str:
        is_container = found["scheme"] in _WITH_CONTAINER and ":" not in found["user"]
        return found[0] if is_container else f"{found['scheme']}://{instead}"

    return _USER.sub(shown, text)


def _masked_query(address: str) -> str:
    """Mask the values of a query and of a fragment; elsewhere than in http a ? may belong to a pattern of names."""
    place, *parts = re.split(r"([?#&;])", address) if re.search(r"[?#]", address) else [address]
    is_http = any(protocol in address for protocol in HTTP)
    for i, part in enumerate(parts):
        name, equals, value = part.partition("=")
        if part in ("", "?", "#", "&", ";") or value in PLAIN_VALUES:
            continue
        if equals and (is_http or "/" not in name):
            parts[i] = f"{name}={MASK}"
        elif not equals and is_http:
            parts[i] = MASK
    return place + "".join(parts)
