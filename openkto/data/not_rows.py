"""Recognise a JSON object that is a whole table instead of a row, for a clear error."""

from openkto.data.problems import BadRow, shorten

SPLITS = {"train", "test", "validation", "valid", "dev", "eval"}


def check_is_a_row(place: str, record: dict[str, object]) -> None:
    """Raise BadRow for a table by its columns, as pandas' to_json writes it, or an object of splits."""
    values = list(record.values())
    lists = [value for value in values if isinstance(value, list)]
    are_columns = len(lists) == len(values) > 1 and len({len(value) for value in lists}) == 1
    holds_cells = any(not isinstance(member, (dict, list)) for value in lists for member in value)
    by_index = len(values) > 1 and all(isinstance(value, dict) and value.keys() == _numbers(value) for value in values)
    is_split = {"columns", "data"} <= record.keys() <= {"columns", "data", "index"}
    if (are_columns and holds_cells) or by_index or is_split:
        cure = "Write one object per row, as pandas does with to_json(FILE, orient='records', lines=True)."
        names = shorten(", ".join(record))
        raise BadRow(place, "a table", "a record must be one row", f"a whole table by its columns, {names}", cure)
    if values and len(lists) == len(values) and record.keys() <= SPLITS:
        cure = f"Write each split into its own file, as jq -c '.{next(iter(record))}[]' FILE does."
        raise BadRow(place, "splits", "a record must be one row", f"the splits {', '.join(record)}", cure)


def _numbers(value: dict[str, object]) -> set[str]:
    return {str(number) for number in range(len(value))} if value else {""}
