"""Seeded faults are found with every row that has them, and of good rows nothing is said."""

import json
import random
import subprocess
import sys
from collections import Counter

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from openkto.commands.inspect import main
from openkto.data.holdout import is_held_out, prompt_digest
from openkto.errors import ConfigError, DataError
from openkto.inspection.label_errors import LOWEST_AUC
from tests.pages.chromium import look_at_page
from tests.text_rows import byte_tokenizer
from tests.tokenizers_for_tests import byte_tokenizer as merging_tokenizer

GOOD = [
    "clear",
    "gentle",
    "thorough",
    "helpful",
    "friendly",
    "precise",
    "patient",
    "complete",
    "honest",
    "careful",
    "kind",
    "exact",
]
BAD = [
    "rude",
    "wrong",
    "lazy",
    "vague",
    "hostile",
    "broken",
    "useless",
    "angry",
    "careless",
    "sloppy",
    "empty",
    "false",
]
COMMON = [
    "the",
    "answer",
    "to",
    "this",
    "comes",
    "from",
    "river",
    "table",
    "garden",
    "window",
    "paper",
    "music",
    "bridge",
    "candle",
    "market",
    "forest",
]


def good_rows(count, seed=0, informative=6):
    """Return rows of distinct texts, half desirable, whose words tell the label."""
    chance = random.Random(seed)
    rows = []
    for i in range(count):
        label = i % 2 == 0
        words = chance.choices(GOOD if label else BAD, k=informative) + chance.choices(COMMON, k=10)
        chance.shuffle(words)
        subject = " ".join(chance.choices(COMMON, k=8))
        prompt = [{"role": "user", "content": f"Tell me of {subject} {i}"}]
        rows.append({"prompt": prompt, "completion": " ".join([*words, str(i)]), "label": label})
    return rows


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.fixture
def look(tmp_path, model, monkeypatch, capsys):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("openkto.pages.inspection_page.length_charts", lambda bars: [])  # their script takes a second

    def run(rows, *flags):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        argv = ["--pretrain", str(model), "--dataset", str(tmp_path / "rows.jsonl"), "--json"]
        main([*argv, "--output", str(tmp_path / "page.html"), *flags])
        found = json.loads(capsys.readouterr().out)
        listed = [json.loads(line) for line in (tmp_path / "page.rows.jsonl").read_text().splitlines()]
        warnings = {finding["kind"]: finding for finding in found["findings"] if finding["is_warning"]}
        assert Counter(row["kind"] for row in listed) == {
            kind.removeprefix("bad row: "): finding["count"] for kind, finding in warnings.items()
        }
        lines: dict[str, list[int]] = {}
        for row in listed:
            lines.setdefault(row["kind"], []).append(int(row["place"].rpartition(":")[2]))
        return found, lines

    return run


def test_of_good_rows_nothing_is_said(look):
    found, lines = look(good_rows(200))
    assert lines == {}
    assert [finding["kind"] for finding in found["findings"] if finding["is_warning"]] == []
    assert found["classes"] == {"desirable": 100, "undesirable": 100}
    assert found["balance_warning"] is None


def test_good_rows_whose_classes_overlap_are_not_taken_for_label_errors(look):
    rows, chance = good_rows(400), random.Random(3)
    for row in rows:
        words = [chance.choice(GOOD if (chance.random() < 0.7) == row["label"] else BAD) for _ in range(5)]
        row["completion"] = " ".join([*words, *chance.choices(COMMON, k=8)])
    found, lines = look(rows)
    assert lines == {}
    assert "words tell the labels with an AUC of 0.8" in found["label_measure"]


def test_rows_whose_words_say_nothing_of_the_label_are_not_suspected(look):
    rows = good_rows(200)
    chance = random.Random(1)
    for row in rows:
        row["label"] = chance.random() < 0.5
    found, lines = look(rows, "--desirable_loss_weight", "auto")
    assert "label likely inverted" not in lines
    assert f"{LOWEST_AUC} is needed" in found["label_measure"]


def test_labels_inverted_in_a_tenth_of_the_rows_are_found_by_their_lines(look):
    rows = good_rows(400)
    inverted = set(random.Random(2).sample(range(400), 40))
    for i in inverted:
        rows[i]["label"] = not rows[i]["label"]
    _, lines = look(rows)
    suspected = {line - 1 for line in lines["label likely inverted"]}
    assert len(suspected & inverted) >= 36
    assert len(suspected - inverted) <= 2


def test_copies_and_all_but_copies_are_found_with_the_rows_that_they_repeat(look):
    rows = good_rows(60)
    rows += [rows[3], rows[3], rows[10]]
    nearly = json.loads(json.dumps(rows[20]))
    nearly["completion"] = nearly["completion"].upper() + "!"
    changed = json.loads(json.dumps(rows[30]))
    changed["completion"] += " indeed"
    found, lines = look([*rows, nearly, changed])
    assert lines["exact duplicate"] == [61, 62, 63]
    assert lines["near duplicate"] == [64, 65]
    by_kind = {finding["kind"]: finding for finding in found["findings"]}
    assert [text.rpartition(":")[2] for text in by_kind["exact duplicate"]["first"]] == ["4", "4", "11"]
    assert [text.rpartition(":")[2] for text in by_kind["near duplicate"]["first"]] == ["21", "31"]


def test_a_pair_of_nearly_equal_answers_is_named_as_such(look):
    long = " ".join(f"word{n}" for n in range(30))
    pairs = [{"prompt": f"Question {n}?", "chosen": f" yes {n} {n}.", "rejected": f" no {n}."} for n in range(4)]
    found, _ = look([*pairs, {"prompt": "Which?", "chosen": f" {long}.", "rejected": f" {long}!!"}])
    (near,) = [finding for finding in found["findings"] if finding["kind"] == "near duplicate"]
    assert near["first"][0].endswith(":5: is nearly the pair's other answer")


def test_one_answer_labelled_both_ways_is_found_in_all_its_rows(look):
    rows = good_rows(60)
    _, lines = look([*rows, rows[5] | {"label": True}, rows[8] | {"label": False}])
    assert sorted(lines["labelled both ways"]) == [6, 9, 61, 62]


def test_what_max_len_cuts_is_counted_by_class_in_rows_and_tokens(look):
    rows = [*good_rows(60), *good_rows(2, seed=5)]
    rows[60]["prompt"][0]["content"] += " long" * 100
    rows[61]["completion"] += " long" * 100
    found, lines = look(rows, "--max_len", "400")
    assert lines["left out at max_len"] == [61]
    assert lines["cut at max_len"] == [62]
    desirable, undesirable = found["lengths"]["desirable"], found["lengths"]["undesirable"]
    assert (desirable["rows left out"], desirable["tokens left out"]) == (1, desirable["longest row"])
    assert (undesirable["rows cut"], undesirable["tokens cut"]) == (1, undesirable["longest row"] - 400)
    assert (desirable["rows cut"], undesirable["rows left out"]) == (0, 0)


def test_all_bad_rows_are_named_and_not_the_first_alone(look):
    rows = good_rows(60)
    for i in range(10, 24):
        rows[i]["completion"] = " "
    rows[30] = {"prompt": "a", "label": True}
    found, lines = look(rows)
    assert lines["empty completion"] == list(range(11, 25))
    assert lines["missing field"] == [31]
    counts = {finding["kind"]: finding["count"] for finding in found["findings"]}
    assert (counts["bad row: empty completion"], counts["bad row: missing field"]) == (14, 1)
    assert found["rows_kept"] == 45


def test_a_template_that_drops_a_message_is_found_with_all_rows(look, model, tmp_path):
    rows = good_rows(60)
    for row in rows[:20]:
        row["prompt"] = [{"role": "system", "content": "Answer in French."}, *row["prompt"]]
    broken = "{% for m in messages %}{% if m['role'] != 'system' %}<|{{ m['role'] }}|>{{ m['content'] }}{% endif %}"
    (model / "chat_template.jinja").write_text(
        f"{broken}{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
    )
    _, lines = look(rows)
    assert lines["system not rendered"] == list(range(1, 21))
    for row in rows:
        row["prompt"] = [{"role": "system", "content": "Answer in French."}, row["prompt"][-1]]
    with pytest.raises(DataError, match=r"All 60 bad rows are in .*page\.rows\.jsonl"):
        look(rows)
    assert len((tmp_path / "page.rows.jsonl").read_text().splitlines()) == 60


def test_prompts_that_are_chats_in_plain_text_are_found_where_no_template_is_applied(look):
    rows = good_rows(40)
    for i, row in enumerate(rows):
        row["prompt"] = row["prompt"][0]["content"]
        if i < 3:
            row["prompt"] = f"User: {row['prompt']}\nAssistant:"
        elif i < 5:
            row["prompt"] = f"[INST] {row['prompt']} [/INST]"
    _, lines = look(rows, "--apply_chat_template", "false")
    assert lines["looks like a chat"] == [1, 2, 3, 4, 5]
    assert lines["left plain"] == list(range(1, 41))
    _, lines = look(rows)
    assert lines["foreign markup"] == [4, 5]


def test_an_answer_that_is_always_the_same_is_found(look):
    rows = good_rows(60)
    for row in rows[10:24]:
        row["completion"] = "I cannot say."
    _, lines = look(rows)
    assert lines["same completion"] == list(range(11, 25))


def test_tokens_that_the_tokenizer_does_not_know_are_found(look, model):
    core = Tokenizer(WordLevel({"[unk]": 0, "<s>": 1, "</s>": 2, "river": 3, "bank": 4, "s": 5}, unk_token="[unk]"))
    core.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="[unk]", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.save_pretrained(model)
    (model / "chat_template.jinja").unlink()
    rows = [{"prompt": "river", "completion": " bank", "label": True} for _ in range(3)]
    rows[1]["completion"] = " garden"
    found, lines = look(rows)
    assert lines["unknown tokens"] == [2]
    counts = {finding["kind"]: finding["count"] for finding in found["findings"] if not finding["is_warning"]}
    assert (counts["no template"], counts["ends with EOS"]) == (3, 3)
    assert "begins with BOS" not in counts


def test_merges_over_the_boundary_and_the_begin_of_text_are_counted(look, model):
    merging_tokenizer(bos="on", chat_template=None, merges=(("a", "b"),)).save_pretrained(model)
    (model / "chat_template.jinja").unlink()
    rows = [{"prompt": "xa", "completion": text, "label": i % 2 == 0} for i, text in enumerate(["b", "c", "bc", "d"])]
    found, _ = look(rows)
    counts = {finding["kind"]: finding["count"] for finding in found["findings"]}
    assert (counts["boundary merged"], counts["begins with BOS"]) == (2, 4)


def test_rows_that_share_a_prompt_are_counted_and_the_weights_balance_the_classes(look):
    rows = good_rows(40)
    rows[0]["prompt"] = rows[1]["prompt"] = rows[2]["prompt"]
    found, lines = look([row for i, row in enumerate(rows) if row["label"] or i % 4 == 1])
    assert lines == {}
    (shared,) = [finding for finding in found["findings"] if finding["kind"] == "shared prompt"]
    assert (shared["count"], shared["text"]) == (
        3,
        "the prompt is another row's too; different prompts: 1",
    )
    assert found["classes"] == {"desirable": 20, "undesirable": 10}
    assert found["weights"] == {"desirable": 1.0, "undesirable": 2.0}
    assert "outside [1, 4/3]" in found["balance_warning"]


def test_rows_of_one_class_are_not_called_free_of_anything_to_warn_of(tmp_path, model, monkeypatch, capsys):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("openkto.pages.inspection_page.length_charts", lambda bars: [])
    for rows, says in (
        (good_rows(6), "nothing to warn of in the rows."),
        ([row for row in good_rows(6) if row["label"]], "nothing else to warn of."),
    ):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        argv = ["--pretrain", str(model), "--dataset", str(tmp_path / "rows.jsonl")]
        main([*argv, "--output", str(tmp_path / "page.html")])
        assert says in capsys.readouterr().out.splitlines()


def test_what_eval_fraction_would_hold_out_is_counted_in_rows_prompts_and_classes(look, caplog):
    rows = good_rows(60)
    for row, earlier in zip(rows[50:], rows, strict=False):
        row["prompt"] = earlier["prompt"]  # fifty prompts, ten of them with two rows of the same label
    prompts = [row["prompt"][0]["content"] for row in rows]
    drawn = [is_held_out(prompt_digest(prompt), 0.3, 42) for prompt in prompts]
    held = [row for row, is_out in zip(rows, drawn, strict=True) if is_out]
    asked = len({row["prompt"][0]["content"] for row in held})
    desirable = sum(row["label"] for row in held)
    assert asked < len(held), "some prompt has two rows"
    found, _ = look(rows, "--eval_fraction", "0.3")
    assert found["held_out"] == (
        f"held out to evaluate on: {len(held)} rows of {asked} prompts ({desirable} desirable, "
        f"{len(held) - desirable} undesirable); left to train on: {60 - len(held)} rows of {50 - asked} prompts"
    )
    assert found["rows_kept"] == 60 - len(held)
    for row, is_out in zip(rows, drawn, strict=True):
        row["label"] = row["label"] and not is_out
    look(rows, "--eval_fraction", "0.3")
    assert "none of the held-out rows is desirable" in caplog.text
    assert look(rows)[0]["held_out"] is None


def test_the_page_shows_the_rows_and_draws_its_charts(tmp_path, model, monkeypatch, capsys):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    texts = good_rows(40)
    texts[3]["completion"] = "<script>alert(1)</script> of the river"
    rows.write_text("".join(json.dumps(row) + "\n" for row in [*texts, texts[0]]))
    page = tmp_path / "deep/page.html"
    main(["--pretrain", str(model), "--dataset", str(rows), "--output", str(page)])
    shown = capsys.readouterr().out
    assert "41 rows read, 41 to train on" in shown
    assert f"{rows}:41: repeats {rows}:1" in shown
    text = page.read_text()
    assert f"{rows}:41: repeats {rows}:1" in text
    assert "⟦" in text
    assert "<script>alert" not in text
    assert "http-equiv" in text
    assert "src=" not in text.partition("<script")[0]
    document, console = look_at_page(page, tmp_path, 390, is_dark=True)
    assert console == []
    assert document.count('class="marks"') == 2


def test_bad_input_is_answered_by_a_sentence(tmp_path, model):
    with pytest.raises(DataError, match="must be an existing file"):
        main(
            ["--pretrain", str(model), "--dataset", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "a.html")]
        )
    with pytest.raises(ConfigError, match="--dataset: is required"):
        main(["--pretrain", str(model)])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--output: must be a page that can be written"):
        main(["--pretrain", str(model), "--dataset", "a.jsonl", "--output", str(tmp_path / "file/a.html")])
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"--output: must be a page that can be written; got the folder .*folder"):
        main(["--pretrain", str(model), "--dataset", "a.jsonl", "--output", str(tmp_path / "folder")])
    assert not (tmp_path / "folder.rows.jsonl").exists()


def test_reading_rows_and_comparing_them_does_not_import_torch():
    code = (
        "import sys, openkto.commands.inspect, openkto.commands.rows, openkto.inspection.result, "
        "openkto.pages.inspection_page; print({'torch', 'deepspeed', 'peft'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
