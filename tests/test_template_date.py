"""A chat template that prints today's date prints one day in all of a run: on all ranks, and in each later start."""

import datetime
import os
from types import SimpleNamespace

import transformers
import yaml

import openkto.commands.resume
from openkto.config import option_of
from tests.helpers.commands import flags, run_to_status
from tests.helpers.records import lines
from tests.ranks import run_ranks
from tests.text_rows import write_model, write_rows


def train_on(days, argv):
    """Train on the day of this rank, with a cache of its own, as on a node of its own."""
    rank = int(os.environ["RANK"])

    class Day(datetime.date):
        @classmethod
        def today(cls):
            return cls.fromisoformat(days[rank])

    openkto.commands.resume.datetime = SimpleNamespace(date=Day)
    return run_to_status([*argv, "--data_cache_dir", f"{os.environ['OPENKTO_CACHE']}/{days[rank]}"])


def test_all_ranks_and_later_starts_print_the_day_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}\n" + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 20, messages=True)
    write_rows(tmp_path / "eval.jsonl", 4, messages=True)
    argv = flags(tmp_path, "--max_steps", "3", "--save_steps", "1", "--load_checkpoint")

    days = ["2026-05-31", "2026-06-01"]
    started = run_ranks(train_on, 2, tmp_path, days, [*argv, "--stop_after_steps", "2"])
    assert [code for code, _ in started] == [0, 0], started
    run_file = yaml.safe_load((tmp_path / "out/run.yaml").read_text())
    assert run_file["template_date"] == "2026-05-31"

    ((code, text),) = run_ranks(train_on, 1, tmp_path, ["2026-06-02"], argv)
    assert code == 0, text
    assert [line["step"] for line in lines(tmp_path / "out", "train")] == [1, 2, 3]
    assert option_of("template_date").same_run  # another one asked for is refused by name


def test_a_template_without_a_date_has_none_in_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    strategy = SimpleNamespace(gather_objects=lambda value: [value])
    config = SimpleNamespace()
    tokenizer = SimpleNamespace(chat_template="{{ messages }}")
    assert openkto.commands.resume.on_one_day(config, strategy, tokenizer) is config
