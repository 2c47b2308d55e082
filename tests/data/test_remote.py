"""Rows that lie elsewhere: fetched once, again where they changed, and what cannot be fetched said in a sentence."""

import gzip
import importlib.util
import json
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pytest

from openkto.config import split_eval_set
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.problems import Findings
from openkto.data.sources import find_source
from openkto.errors import DataError
from tests.text_rows import byte_tokenizer

ROWS = [{"prompt": f"Q{i}?", "completion": f" A{i}.", "label": i % 2 == 0} for i in range(4)]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


class Server(ThreadingHTTPServer):
    """Serves `files`: path to (body, ETag), and counts the bodies that were read to their end."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.declared, self.queries = {}, {}, []

    def address(self, path):
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        path, _, query = self.path.partition("?")
        self.server.queries.append(query)
        if path not in self.server.files:
            self.send_error(404)
            return
        body, etag = self.server.files[path]
        self.send_response(200)
        self.send_header("Content-Length", str(self.server.declared.get(path, len(body))))
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


def prompts(item, cache):
    source = find_source(item, "train", cache_dir=cache)
    return [record["prompt"] for _, _, record in source.records(Findings())]


def copies(cache):
    return sorted((cache / "fetched").iterdir())


def error_of(item, cache):
    with pytest.raises(DataError) as caught:
        find_source(item, "train", cache_dir=cache)
    return str(caught.value)


def test_a_file_on_a_web_server_is_fetched_once_and_again_when_it_changes(server, tmp_path):
    server.files["/d/rows.jsonl.gz"] = gzip.compress(lines(ROWS)), '"one"'
    address = server.address("/d/rows.jsonl.gz?key=secret")
    assert prompts(address, tmp_path) == ["Q0?", "Q1?", "Q2?", "Q3?"]
    (first,) = copies(tmp_path)
    written = first.stat().st_mtime_ns
    assert prompts(address, tmp_path) == ["Q0?", "Q1?", "Q2?", "Q3?"]
    assert [copy.stat().st_mtime_ns for copy in copies(tmp_path)] == [written]
    server.files["/d/rows.jsonl.gz"] = gzip.compress(lines(ROWS[2:])), '"two"'
    assert prompts(address, tmp_path) == ["Q2?", "Q3?"]
    assert set(server.queries) == {"key=secret"}  # sent, and said nowhere
    assert find_source(address, "train", cache_dir=tmp_path).name == server.address("/d/rows.jsonl.gz")


def test_a_file_of_which_a_server_tells_no_version_is_fetched_at_each_start(server, tmp_path):
    for rows in (ROWS, ROWS[::-1]):
        server.files["/rows.jsonl"] = lines(rows), ""
        assert prompts(server.address("/rows.jsonl"), tmp_path) == [row["prompt"] for row in rows]


def test_a_transfer_that_ends_early_leaves_no_copy(server, tmp_path):
    server.files["/rows.jsonl"] = lines(ROWS), '"one"'
    server.declared["/rows.jsonl"] = 10_000
    address = server.address("/rows.jsonl")
    assert "must be readable from here; got" in error_of(address, tmp_path)
    assert copies(tmp_path) == []


def test_what_is_not_there_or_cannot_be_asked_is_named_without_secrets(server, tmp_path):
    address = server.address("/no.jsonl")
    assert error_of(f"{address}?key=secret", tmp_path) == (
        f"{address}: must be an existing file; got no such file there. Correct the address."
    )
    port = server.server_port
    server.server_close()
    server.shutdown()
    text = error_of(f"http://me:secret@127.0.0.1:{port}/rows.jsonl", tmp_path)
    assert text.startswith(f"http://127.0.0.1:{port}/rows.jsonl: must be readable from here; got ")
    assert "secret" not in text


def test_a_pattern_and_a_part_of_an_archive_are_read_through_fsspec(memory, tmp_path):
    for number in (1, 0):
        memory.pipe(f"/bucket/part-{number}.jsonl", lines(ROWS[2 * number : 2 * number + 2]))
    memory.pipe("/bucket/notes.txt", b"no rows")
    assert prompts("memory://bucket/part-*.jsonl", tmp_path) == ["Q0?", "Q1?", "Q2?", "Q3?"]
    source = find_source("memory://bucket/part-?.jsonl", "train", cache_dir=tmp_path)
    assert [part.name for part in source.parts] == [f"memory:///bucket/part-{i}.jsonl" for i in (0, 1)]
    assert len(copies(tmp_path)) == 2
    with memory.open("/bucket/all.zip", "wb") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("in/rows.jsonl", lines(ROWS[:1]))
    assert prompts("zip://in/rows.jsonl::memory://bucket/all.zip", tmp_path) == ["Q0?"]
    assert "memory://bucket/*.csv: must match at least one file; got no match." in error_of(
        "memory://bucket/*.csv", tmp_path
    )
    assert "must be a file or a pattern of files; got a folder." in error_of("memory://bucket", tmp_path)
    assert "must be an existing file; got no such file there." in error_of("memory://bucket/x.csv", tmp_path)
    assert "a data file's name must end in one of .jsonl" in error_of("memory://bucket/notes.txt", tmp_path)


def test_equal_rows_are_tokenised_once_wherever_they_lie(memory, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS))
    memory.pipe("/bucket/rows.jsonl", lines(ROWS))
    places = ["memory://bucket/rows.jsonl", f"file://{tmp_path}/rows.jsonl", str(tmp_path / "rows.jsonl")]
    made = [UnpairedPreferenceDataset(place, byte_tokenizer(), cache_dir=tmp_path / "cache") for place in places]
    assert len({dataset.fingerprint() for dataset in made}) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 2  # one preparation beside the folder of copies


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3 can be read here")
def test_a_missing_package_is_named(tmp_path):
    assert error_of("s3://bucket/rows.jsonl", tmp_path) == (
        "s3://bucket/rows.jsonl: needs a package to be read; got a Python without the package for s3. "
        "Install s3fs to access S3."
    )


def test_an_unknown_protocol_is_one_sentence(tmp_path):
    assert error_of("gopher://x/rows.jsonl", tmp_path).startswith("gopher://x/rows.jsonl: must be readable from here; ")


def test_a_set_is_named_after_the_file_at_its_address():
    assert split_eval_set("https://example.org/d/held.jsonl?key=x")[0] == "held"
