"""Which reader opens which file: one generator function per file format.

A reader yields (place, value) and adds to the findings what it recognised. The value is the decoded record, or a
`BadRow` where only this record is unreadable. What makes the rest of the file unreadable (encoding, a broken array or
container) is raised as a DataError.
"""

from collections.abc import Callable

from openkto.data.arrow_files import read_arrow, read_parquet
from openkto.data.csv_files import read_csv
from openkto.data.json_files import Records, read_json
from openkto.data.problems import Findings
from openkto.data.text_files import DataFile

READERS: dict[str, Callable[[DataFile, Findings], Records]] = {
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
# Those that are read when they are compressed, too.
TEXT_CONTAINERS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")


def read_file(file: DataFile, findings: Findings) -> Records:
    """Yield a file's records with their places."""
    return READERS[file.container](file, findings)
