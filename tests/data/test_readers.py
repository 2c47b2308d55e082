"""Reading files: every container gives the same records, and every damage one sentence with its place."""

import bz2
import gzip
import json
import lzma
import sys
import tracemalloc
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openkto.data.problems import BadRow, Findings, data_error
from openkto.data.readers import read_file
from openkto.data.sources import find_source
from openkto.data.text_files import DataFile
from openkto.errors import DataError

ROWS = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "ü", "completion": "d\ne", "label": False}]


def read(path: Path) -> list[tuple[str, object]]:
    return list(read_file(DataFile(path, str(path)), Findings()))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def error_of(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    return str(caught.value)


def write_parquet(path: Path, rows: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_arrow(path: Path, rows: list[dict], is_stream: bool) -> Path:
    table = pa.Table.from_pylist(rows)
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def test_json_lines_have_line_numbers_and_blank_lines_are_not_rows(tmp_path):
    lines = json.dumps(ROWS[0]) + "\r\n\n   \n" + json.dumps(ROWS[1])
    path = write(tmp_path / "a.jsonl", lines)
    assert read(path) == [(f"{path}:1", ROWS[0]), (f"{path}:4", ROWS[1])]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_byte_order_mark_is_stripped(tmp_path, name):
    content = {"a.jsonl": '{"x": "1"}', "a.json": '[{"x": "1"}]', "a.csv": "x\n1"}[name]
    plain, marked = write(tmp_path / name, content), write(tmp_path / f"b{name}", "\ufeff" + content)
    assert [value for _, value in read(marked)] == [value for _, value in read(plain)] == [{"x": "1"}]


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_read_element_by_element_with_line_numbers(tmp_path, indent):
    path = write(tmp_path / "a.json", "\n" + json.dumps(ROWS, indent=indent) + "\n")
    assert [value for _, value in read(path)] == ROWS
    assert [place for place, _ in read(path)] == [f"{path}:{n}" for n in ((2, 2) if indent is None else (3, 8))]


def test_json_lines_in_a_json_file_work(tmp_path):
    path = write(tmp_path / "a.json", "\n".join(json.dumps(row) for row in ROWS))
    assert [value for _, value in read(path)] == ROWS


def test_csv_records_carry_the_line_where_they_begin(tmp_path):
    path = write(tmp_path / "a.csv", 'prompt,completion,label\n"a\nb",c,true\n\nd,"e ""f""",false\n')
    assert read(path) == [
        (f"{path}:2", {"prompt": "a\nb", "completion": "c", "label": "true"}),
        (f"{path}:5", {"prompt": "d", "completion": 'e "f"', "label": "false"}),
    ]


def test_a_csv_cell_may_be_long(tmp_path):
    path = write(tmp_path / "a.csv", "x\n" + "y" * 300_000)
    assert read(path)[0][1] == {"x": "y" * 300_000}


def test_parquet_and_arrow_rows_are_numbered_from_zero(tmp_path):
    for path in (
        write_parquet(tmp_path / "a.parquet", ROWS),
        write_arrow(tmp_path / "file.arrow", ROWS, is_stream=False),
        write_arrow(tmp_path / "stream.arrow", ROWS, is_stream=True),
    ):
        assert read(path) == [(f"{path}:row 0", ROWS[0]), (f"{path}:row 1", ROWS[1])]


def test_members_that_arrow_adds_to_message_structs_are_dropped(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "c"}], "x": None}
    ]
    assert read(write_parquet(tmp_path / "a.parquet", rows))[0][1] == rows[0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"a": 1', "must be one JSON object (Expecting ',' delimiter at column 8)"),
        ("{'a': 1}", "Expecting property name enclosed in double quotes at column 2"),
        ('{"a": 1} x', "Extra data at column 10"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' stands twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "1" * 5000 + "}", "a number with too many digits"),
    ],
)
def test_a_broken_line_is_one_bad_row_and_reading_continues(tmp_path, line, says):
    path = write(tmp_path / "a.jsonl", '{"a": 0}\n' + line + '\n{"a": 2}\n')
    records = read(path)
    assert [value for _, value in records if not isinstance(value, BadRow)] == [{"a": 0}, {"a": 2}]
    message = str(records[1][1])
    assert message.startswith(f"{path}:2: must be one JSON object (")
    assert says in message
    assert message.endswith(", or pass --on_bad_rows skip to leave such rows out.")
    assert ("This is Python's notation: write rows with json.dumps" in message) == line.startswith("{'")
    assert len(message) < 400


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_utf_16_and_32_are_read_by_the_mark_at_their_start(tmp_path, encoding):
    # U+0A0D and U+0D0A hold the bytes of line ends.
    rows = [*ROWS, {"prompt": "\u0a0d\u0d0a", "completion": "e", "label": True}] * 3
    text = "\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)
    path = write(tmp_path / "a.jsonl", text.encode(encoding))
    assert read(path) == [(f"{path}:{number}", row) for number, row in enumerate(rows, 1)]
    path = write(tmp_path / "excel.csv", '\ufeffprompt\tlabel\r\n"a\nb"\t1\r\n'.encode(encoding))
    assert [record for _, record in read(path)] == [{"prompt": "a\nb", "label": "1"}]
    path = write(tmp_path / "cut.csv", "\ufeffprompt\tlabel\r\na\t1".encode(encoding)[:-1])
    assert error_of(path).startswith(f"{path}:2: must be {encoding[:6].upper()} text, as its first bytes say; got ")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_utf_16_and_32_without_a_mark_are_named(tmp_path, encoding, name):
    path = write(tmp_path / name, json.dumps(ROWS[0]).encode(encoding))
    assert error_of(path).startswith(f"{path}:1: must be UTF-8 text; got UTF-16 or UTF-32, b'")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
def test_another_encoding_is_named_with_its_line_and_byte(tmp_path, name):
    first, second = {"a.jsonl": ('{"a": 1}', '{"a": "ü"}'), "a.csv": ("a", "ü"), "a.json": ("[1,", '"ü"]')}[name]
    path = write(tmp_path / name, (first + "\n" + second).encode("latin-1"))
    column = second.index("ü") + 1
    cure = "Save the file as UTF-8, in Excel as CSV UTF-8." if name == "a.csv" else "Save the file as UTF-8."
    assert error_of(path) == f"{path}:2: must be UTF-8 text; got the byte 0xfc at column {column}. {cure}"


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ('[{"a": 1},\n{"a": }]', 2, "an element of the array must be JSON (Expecting value at column 7)"),
        ('[{"a": 1}\n{"a": 2}]', 2, "a comma or ] must follow an element of the array; got '{\"a\": 2}]'"),
        ('[{"a": 1},\n', 2, "an element of the array must be JSON"),
        ('[\n{"a": 1}', 2, "a comma or ] must follow an element of the array; got the end of the file"),
        ('[{"a": 1}]\n\nx', 3, "nothing may follow the array; got 'x'"),
        ("[" * 100_000, 1, "nested too deeply"),
    ],
)
def test_a_broken_array_is_an_error_at_its_line(tmp_path, content, line, says):
    path = write(tmp_path / "a.json", content)
    message = error_of(path)
    assert message.startswith(f"{path}:{line}: ")
    assert says in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a,a\n1,2", ":1: the first line must name each column once; got ['a', 'a']. Name the columns."),
        (",\n1,2", ":1: the first line must name each column once; got ['', '']. Name the columns."),
        ('a\n1\n"2\n3', ":3: must be CSV (unexpected end of data); got a line that is not."),
        ('a\n"1"2\n', ":2: must be CSV (',' expected after '\"'); got a line that is not."),
    ],
)
def test_broken_csv_is_an_error_at_its_line(tmp_path, content, says):
    path = write(tmp_path / "a.csv", content)
    assert error_of(path).startswith(str(path) + says)


def test_a_csv_line_with_too_few_cells_is_a_bad_row(tmp_path):
    path = write(tmp_path / "a.csv", "a,b\n1\n1,2\n")
    (_, bad), (_, good) = read(path)
    assert str(bad).startswith(f"{path}:2: must have as many cells as the first line, 2; got 1: ['1']. Fix the row")
    assert good == {"a": "1", "b": "2"}


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"ARROW1", b"hello world" * 20, b"\xff" * 64])
def test_a_container_that_is_none_is_one_sentence(tmp_path, name, content):
    path = write(tmp_path / name, content)
    assert error_of(path).startswith(f"{path}: must be a readable ")


def test_a_sentence_has_no_doubled_full_stop(tmp_path):
    path = write(tmp_path / "a.parquet", b"hello world" * 20)
    message = error_of(path)
    assert ".. " not in message.replace("... ", " ")
    assert message.endswith(". Write the file again.")
    assert str(data_error("f", "a rule", "this.", "Cure.")) == "f: a rule; got this. Cure."
    assert str(BadRow("f", "kind", "a rule", "this.", "Cure.")) == "f: a rule; got this. Cure."


def test_reading_leaves_the_recursion_limit_alone(tmp_path):
    limit = sys.getrecursionlimit()
    error_of(write(tmp_path / "a.jsonl", "[" * 100_000))
    assert sys.getrecursionlimit() == limit


@pytest.mark.parametrize(
    ("name", "content", "places"),
    [
        ("array.jsonl", json.dumps(ROWS, indent=2), [2, 7]),
        ("array.jsonl", json.dumps(ROWS), [1, 1]),
        ("pretty.jsonl", "\n".join(json.dumps(row, indent=2) for row in ROWS), [1, 6]),
        ("pretty.json", "".join(json.dumps(row, indent=2) for row in ROWS), [1, 5]),
        ("wrapper.json", json.dumps({"version": 1, "data": ROWS, "total": [2]}, indent=1), [4, 9]),
        ("wrapper.json", json.dumps({"rows": ROWS}), [1, 1]),
    ],
)
def test_json_is_read_in_the_forms_that_people_have(tmp_path, name, content, places):
    path = write(tmp_path / name, content)
    assert read(path) == [(f"{path}:{line}", row) for line, row in zip(places, ROWS, strict=True)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{\n "a": 1\n}\n{\n "a": }\n', ":5: an object must be JSON (Expecting value"),
        ('{"data": [\n{"a": 1}\n', ":3: a comma or ] must follow an element of the array; got the end of the file"),
        ('{"data": [\n{"a": 1}\n] 3', ":3: a comma or } must follow the list of rows; got '3'"),
        ('{"data": [\n{"a": 1}\n]}\n{}', ":4: nothing may follow the object that holds the rows; got '{}'"),
    ],
)
def test_a_broken_form_is_an_error_at_its_line(tmp_path, content, says):
    path = write(tmp_path / "a.json", content)
    assert error_of(path).startswith(str(path) + says)


def test_a_line_that_was_cut_is_a_bad_row_and_no_other_form(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a": "x\n{"a": 1}\n')
    assert [isinstance(value, BadRow) for _, value in read(path)] == [True, False]


@pytest.mark.parametrize(
    ("name", "content", "finding"),
    [
        ("a.csv", ",x,y\n0,1,2\n", "a column without a name is left out"),
        ("a.csv", "x;y\n1;2\n", "its cells are separated by semicolons"),
        ("a.csv", "sep=;\nx;y\n1;2\n", None),
        ("a.csv", "\n x ,y \n1,2\n", None),
        ("a.tsv", "x\ty\n1\t2\n", None),
        ("a.csv", "x|y\n1|2\n", "its cells are separated by bars"),
    ],
)  # fmt: skip
def test_csv_is_read_in_the_forms_that_people_have(tmp_path, name, content, finding):
    path, findings = write(tmp_path / name, content), Findings()
    rows = list(read_file(DataFile(path, str(path)), findings))
    assert [row for _, row in rows] == [{"x": "1", "y": "2"}]
    assert rows[0][0] == f"{path}:{content.count(chr(10))}"
    assert findings.lines() == ([f"{path}: {finding}"] if finding else [])


def test_quotes_that_are_escaped_by_backslashes_are_named(tmp_path):
    path = write(tmp_path / "a.csv", 'x,y\n1,"a \\"b\\" c"\n')
    assert "Write a quote inside quotes twice" in error_of(path)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_compressed_text_is_read_and_a_cut_file_is_one_sentence(tmp_path, suffix):
    content = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    packed = pack[suffix](content) if suffix in pack else pa.Codec("zstd").compress(content, asbytes=True)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed)
    assert read(path) == [(f"{path}:1", ROWS[0]), (f"{path}:2", ROWS[1])]
    path.write_bytes(packed[:-10])
    assert f": must be a whole {suffix} file; got " in error_of(path)


@pytest.mark.parametrize("container", ["parquet", "arrow", "folder"])
def test_class_labels_are_read_by_their_names(tmp_path, container):
    label = datasets.Features({"x": datasets.Value("string"), "label": datasets.ClassLabel(names=["yes", "no"])})
    rows = datasets.Dataset.from_dict({"x": ["a", "b", "c"], "label": [0, 1, -1]}, features=label)
    findings = Findings()
    if container == "folder":
        rows.save_to_disk(str(tmp_path / "saved"))
        read_rows = [value for _, _, value in find_source(tmp_path / "saved", "train").records(findings)]
    else:
        path = tmp_path / f"a.{container}"
        if container == "parquet":
            rows.to_parquet(str(path))
        else:
            with pa.ipc.new_file(str(path), rows.data.table.schema) as writer:
                writer.write_table(rows.data.table)
        read_rows = [value for _, value in read_file(DataFile(path, str(path)), findings)]
    assert [row["label"] for row in read_rows] == ["yes", "no", None]
    assert "the classes of label are read by their names, yes, no" in findings.lines()[0]


def test_an_array_is_read_as_it_is_needed(tmp_path):
    elements = (json.dumps({"n": n, "t": "x" * 1000}) for n in range(5000))
    path = write(tmp_path / "a.json", "[\n" + ",\n".join(elements) + "\n]")
    tracemalloc.start()
    assert sum(row["n"] for _, row in read_file(DataFile(path, str(path)), Findings())) == 5000 * 4999 // 2
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6


@pytest.mark.parametrize(
    ("name", "content", "got"),
    [
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "a gzip file. Let its name end in .gz."),
        ("a.csv", bz2.compress(b"a"), "a bzip2 file. Let its name end in .bz2."),
        ("a.json", b"PAR1....", "a Parquet file. Let its name end in .parquet."),
        ("a.csv", b"PK\x03\x04....", "a zip file, as .xlsx files are. Unpack it; export a sheet of Excel as CSV."),
        ("a.jsonl", b"\n<!DOCTYPE html><html>", "a web page. Download the file itself; a page may ask to log in."),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS to them. Fetch the file "),
        ("a.jsonl.gz", b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS to them. Fetch the "),
    ],
    ids=["gzip", "bzip2", "parquet", "zip", "html", "lfs", "lfs.gz"],
)
def test_a_file_that_is_not_what_its_name_says_is_named_by_what_it_is(tmp_path, name, content, got):
    write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        find_source(tmp_path / name, "train")
    assert f"; got {got}" in str(caught.value)


def test_line_ends_of_old_macs_are_named_and_rows_of_empty_cells_are_none(tmp_path):
    path = write(tmp_path / "mac.csv", "prompt,label\ra,1\r")
    assert error_of(path) == (
        f"{path}:1: its lines must end with a line feed; got line ends of old Macs (\\r). "
        "Save it with line feeds, as tr '\\r' '\\n' does."
    )
    path = write(tmp_path / "excel.csv", "prompt,label\r\na,1\r\n,\r\n,\r\n")
    assert [record for _, record in read(path)] == [{"prompt": "a", "label": "1"}]


def test_the_answer_of_the_hubs_dataset_viewer_is_its_rows(tmp_path):
    members = [{"row_idx": i, "row": row, "truncated_cells": []} for i, row in enumerate(ROWS)]
    members.append({"row_idx": 2, "row": {"prompt": "a..."}, "truncated_cells": ["prompt"]})
    answer = {"features": [{"name": "prompt"}], "rows": members, "num_rows_total": 3, "partial": False}
    for indent in (None, 1):
        path = write(tmp_path / "rows.json", json.dumps(answer, indent=indent))
        (_, first), (_, second), (_, cut) = read(path)
        assert [first, second] == ROWS
        assert isinstance(cut, BadRow)
        assert "cells must be whole; got ['prompt'] cut short by the viewer. Name the dataset by its" in str(cut)
