"""The texts of rows by their numbers, as they are in the files, before any chat template."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from openkto.data.messages import Message
from openkto.data.numbered import NumberedRows
from openkto.data.problems import BadRow, Findings
from openkto.data.row import RowSettings
from openkto.data.sources import Source


@dataclass(frozen=True)
class RowText:
    """A row's place in its file and its texts."""

    place: str
    prompt: str
    completion: str


def row_texts(
    sources: list[Source], settings: RowSettings, numbers: Iterable[int], *, max_samples: int
) -> dict[int, RowText]:
    """Return the rows of these numbers, as `UnpairedPreferenceDataset` counts them; what cannot be read is left out.

    Of the settings those count that say where a row's parts are, and not those that change its prompt.

    Raises DataError where a file cannot be read.
    """
    settings, wanted = replace(settings, input_template=None, apply_chat_template=None), set(numbers)
    found: dict[int, RowText] = {}
    first_row = 0
    for source in sources:
        numbered = NumberedRows(source, settings, max_samples, Findings(), first_row=first_row)
        for number, rows in numbered:
            for row in [] if isinstance(rows, BadRow) else rows:
                if number + row.offset in wanted:
                    found[number + row.offset] = RowText(row.place, text_of(row.prompt), text_of(row.completion))
            if len(found) == len(wanted):
                return found
        numbered.skip_rest()
        first_row = numbered.next_row
    return found


def text_of(value: str | list[Message]) -> str:
    """Return a prompt's or a completion's text; messages begin with their roles."""
    if isinstance(value, str):
        return value
    return "\n".join(f"{message['role']}: {message['content']}" for message in value)
