"""What strangers' rows and tokenizers may take of time and memory."""

import json
import os
import resource
import signal
import threading
import time

import datasets
import pytest
from tokenizers import Regex, pre_tokenizers

from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.errors import DataError
from openkto.process.limits import ROW_CHARACTERS, OutOfTimeError, time_limit
from openkto.process.stops import StopRequest
from tests.tokenizers_for_tests import byte_tokenizer


def write(path, *completions):
    rows = [{"prompt": "p", "completion": completion, "label": i % 2 == 0} for i, completion in enumerate(completions)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_row_that_would_fill_the_memory_is_a_bad_row(tmp_path):
    path = write(tmp_path / "rows.jsonl", "a", "b" * ROW_CHARACTERS, "c")
    with pytest.raises(DataError) as error:
        UnpairedPreferenceDataset(path, byte_tokenizer(chat_template=None))
    assert str(error.value).startswith(
        f"{path}:2: prompt and completion must have at most 5,000,000 characters, more than any model takes; got "
        "5,000,001. Fix the row, "
    )
    assert UnpairedPreferenceDataset(path, byte_tokenizer(chat_template=None), on_bad_rows="skip").report.skipped == {
        "too large": 1
    }


def test_long_rows_are_written_in_small_batches_with_the_same_result(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl", *[str(n) * 30 for n in range(9)])
    whole = UnpairedPreferenceDataset(path, byte_tokenizer(chat_template=None), cache_dir=tmp_path / "a")
    monkeypatch.setattr("openkto.data.prepare.BATCH_CHARACTERS", 70)
    parts = UnpairedPreferenceDataset(path, byte_tokenizer(chat_template=None), cache_dir=tmp_path / "b")
    assert parts._rows.data.column("row").num_chunks == 3
    assert parts.fingerprint() == whole.fingerprint()


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


TOO_LONG = "the chat template must render at most 5,000,000 characters, more than any model takes; got"


@pytest.mark.parametrize(
    ("template", "rule"),
    [
        (ENDLESS, "the messages must be ones that the tokenizer's chat template takes; got OutOfTimeError: "),
        ("{{ 'a' * 6000000 }}", f"{TOO_LONG} 6,000,001"),
        ("{{ messages[0]['content'] * 1000000000 }}", f"{TOO_LONG} more than 512 MiB of memory"),
        (
            "{% set n = namespace(a='abc') %}{% for i in range(30) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
            f"{TOO_LONG} more than 512 MiB of memory",
        ),
    ],
)
def test_a_template_without_an_end_or_of_endless_text_is_one_sentence(tmp_path, template, rule, monkeypatch):
    monkeypatch.setattr("openkto.data.template.time_limit", lambda: time_limit(0.3))
    message = [{"role": "user", "content": "a"}]
    rows = [{"prompt": message, "completion": [{"role": "assistant", "content": "b"}], "label": True}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = byte_tokenizer(chat_template="{{ messages[0]['content'] }}" + template)
    started, earlier = time.process_time(), resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(DataError) as error:
        UnpairedPreferenceDataset(path, tokenizer)
    assert rule in str(error.value)
    assert time.process_time() - started < 20
    assert resource.getrlimit(resource.RLIMIT_AS) == earlier


def panicking_tokenizer():
    """Return one whose expression takes a library's whole patience for a row of many a's with another end."""
    tokenizer = byte_tokenizer(chat_template=None)
    backend = tokenizer.backend_tokenizer
    split = pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    return tokenizer


def test_a_row_on_which_the_tokenizers_library_panics_is_named(tmp_path):
    path = write(tmp_path / "rows.jsonl", "x", "a" * 2000 + "b", "y")
    with pytest.raises(DataError) as error:
        UnpairedPreferenceDataset(path, panicking_tokenizer())
    message = str(error.value)
    assert message.startswith(
        f"{path}:2: the text must be one that the tokenizer's library can split; got a panic in it: "
    )
    assert "\n" not in message
    kept = UnpairedPreferenceDataset(path, panicking_tokenizer(), on_bad_rows="skip")
    assert kept.report.skipped == {"tokenizer": 1}
    assert kept.rows.tolist() == [0, 2]


def test_a_named_pipe_or_a_device_among_the_data_is_refused_not_read(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(
        DataError, match=r"rows\.jsonl: must be a plain file, which can be read twice; got a named pipe"
    ):
        UnpairedPreferenceDataset(tmp_path / "rows.jsonl", byte_tokenizer())
    (tmp_path / "endless.jsonl").symlink_to("/dev/zero")
    with pytest.raises(DataError, match="got a device"):
        UnpairedPreferenceDataset(tmp_path / "endless.jsonl", byte_tokenizer())


def test_a_named_pipe_in_a_saved_data_set_is_refused_not_read(tmp_path):
    rows = [{"prompt": "a", "completion": "b", "label": True}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    for path in (file, tmp_path / "saved/state.json"):
        content = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(DataError, match=rf"{path}: must be a plain file, .* got a named pipe"):
            UnpairedPreferenceDataset(tmp_path / "saved", byte_tokenizer(chat_template=None))
        path.unlink()
        path.write_bytes(content)
    assert len(UnpairedPreferenceDataset(tmp_path / "saved", byte_tokenizer(chat_template=None))) == 1


def test_a_thread_that_computes_too_long_ends_and_one_that_ends_in_time_is_left_alone():
    said = []

    def work():
        with time_limit(0.5):
            said.append("in time")
        try:
            with time_limit(0.1):
                compute_for_ever()
        except OutOfTimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert said == ["in time", "no end after 0.1 s"]


def compute_for_ever():
    while True:
        pass


def test_what_computes_too_long_ends_and_what_waits_or_ends_in_time_does_not():
    earlier = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(OutOfTimeError, match=r"no end after 0\.1 s"), time_limit(0.1):
        compute_for_ever()
    with time_limit(0.1):
        time.sleep(0.3)
    assert signal.getsignal(signal.SIGVTALRM) is earlier
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_time_limit_is_no_request_to_stop():
    with StopRequest() as stop:
        with pytest.raises(OutOfTimeError), time_limit(0.05):
            compute_for_ever()
        time.sleep(0.2)
        assert stop.reason is None
        assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())
