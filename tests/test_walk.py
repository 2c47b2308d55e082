"""From a support desk's export to a model that answers, as a newcomer walks: one command after the other."""

import contextlib
import io
import json
import logging
import os
import re
from dataclasses import dataclass

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from openkto.__main__ import dispatch
from tests.helpers.commands import run_to_status
from tests.helpers.support_desk import write_support_desk
from tests.ranks import run_ranks
from tests.text_rows import write_model

FIELDS = "--input_key question --output_key answer --label_key rating"
ROWS = f"--pretrain model --dataset tickets.csv {FIELDS} --eval_fraction 0.15"
COMMANDS = {
    "inspect": f"inspect {ROWS}",
    "plan": f"plan {ROWS} --on_bad_rows skip --tflops 0.01",
    "check": f"train {ROWS} --on_bad_rows skip --save_path support --check",
    "train": f"train {ROWS} --on_bad_rows skip --save_path support --train_batch_size 8 --max_epochs 2",
    "report": "report support",
    "evaluate": "evaluate --pretrain support --eval_dataset support/eval_split.json",
}
# What inspect and --check warn of.
IGNORANT = {
    "without the fields": "train --pretrain model --dataset tickets.csv --save_path other --check",
    "with bad rows": f"train {ROWS} --save_path other --check",
}
LINES_OF_A_SCREEN = 40


@dataclass(frozen=True)
class Done:
    """What a command ended with, and said."""

    status: int
    output: str
    log: str


def walk(folder: str) -> dict[str, Done]:
    os.chdir(folder)
    os.environ["OPENKTO_CACHE"] = f"{folder}/cache"
    disable_progress_bar()  # as a start by itself does before it imports transformers
    done = {}
    for name, line in (COMMANDS | IGNORANT).items():
        logging.getLogger().handlers.clear()  # or this command would log to where the one before did
        with contextlib.redirect_stdout(io.StringIO()) as output:
            status, log = run_to_status(line.split(), dispatch)
        done[name] = Done(status, output.getvalue(), log)
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("walk")
    write_model(folder / "model")
    faults = write_support_desk(folder / "tickets.csv")
    (done,) = run_ranks(walk, 1, folder, str(folder))
    return folder, faults, done


def test_from_the_export_to_the_report_no_command_fails(place):
    _, _, done = place
    assert {name: done[name].status for name in COMMANDS} == dict.fromkeys(COMMANDS, 0), done
    assert len(COMMANDS) < 8


def test_inspect_counts_each_fault_of_the_export_and_says_what_to_pass(place):
    folder, faults, done = place
    said = done["inspect"].output
    assert f"{faults['read']} rows read" in said
    for kind, fault in (
        ("bad row: empty completion", "empty"),
        ("bad row: label", "unrated"),
        ("exact duplicate", "copies"),
        ("labelled both ways", "both ways"),
    ):
        assert f"warning: {kind}: {faults[fault]}: " in said
    assert "--on_bad_rows skip" in done["inspect"].log.splitlines()[-1]
    listed = [json.loads(line) for line in (folder / "inspect.rows.jsonl").read_text().splitlines()]
    assert len(listed) == sum(faults.values()) - faults["read"]
    # The answers hold line breaks: a place is the line of the file at which its row begins.
    lines = (folder / "tickets.csv").read_text(encoding="utf-8-sig").splitlines()
    assert all(re.match(r"1\d\d\d,", lines[int(row["place"].rpartition(":")[2]) - 1]) for row in listed)


def test_what_would_stop_or_spoil_the_run_was_said_by_the_command_before(place):
    _, _, done = place
    assert done["with bad rows"].status == 3
    assert "--on_bad_rows skip" in done["with bad rows"].log
    assert done["without the fields"].status == 3
    assert FIELDS in done["without the fields"].log
    assert done["plan"].output.splitlines()[-1].startswith(f"openkto train {ROWS} --on_bad_rows skip")
    # --check says with which flags the rows are enough steps; the run with them has no such warning.
    advice = re.search(r"Pass (--train_batch_size \d+ --max_epochs \d+), for example", done["check"].log)
    assert advice
    assert advice[1] in COMMANDS["train"]
    assert "the model hardly changes" not in done["train"].log
    held_out = re.search(r"--eval_fraction: held out to evaluate on: (\d+) rows of", done["inspect"].output)
    assert held_out
    assert re.search(rf"^rows +{held_out[1]}$", done["evaluate"].output, re.MULTILINE)


def test_the_log_of_the_run_fits_a_screen_and_says_where_its_model_is(place):
    _, _, done = place
    lines = (done["train"].log + done["train"].output).splitlines()
    assert len(lines) <= LINES_OF_A_SCREEN, lines
    assert max(map(len, lines)) < 330, "no line of numbers that nobody reads"
    assert lines[-1] == "the model is in support"
    assert done["report"].log.splitlines() == ["the report is in support/report.html"]


def test_the_model_answers_a_question(place):
    folder, _, _ = place
    tokenizer = AutoTokenizer.from_pretrained(folder / "support")
    model = AutoModelForCausalLM.from_pretrained(folder / "support")
    question = [{"role": "user", "content": "When does my lamp arrive?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert inputs["input_ids"].shape[1] < answer.shape[1] <= inputs["input_ids"].shape[1] + 8
