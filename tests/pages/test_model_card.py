"""The model card: a head that the Hub takes, what the run was, and neither paths nor rows."""

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from openkto.commands.card import base_model, write_card
from openkto.models.licence import licence_of
from openkto.pages.model_card import Base, card_of, last_part, model_step
from openkto.pages.run_files import read_run
from tests.pages.made_runs import learning_run, start, summary, train_line, write_run

SECRETS = ("/home", "jane", "s3cret", "bucket", "X-Key")
SETTINGS = """
pretrain: /home/jane/models/tiny
dataset: [/home/jane/rows.jsonl, "https://jane:s3cret@host/bucket/more.csv?X-Key=s3cret", some/thumbs, "a/b:en"]
eval_dataset: ["math=/home/jane/held_out.jsonl", '{"path": "/home/jane/stars.csv", "label_key": "s3cret"}']
ds_config: /home/jane/ds.json
beta: 0.2
max_norm: 0.5
adam_betas: [0.9, 0.95]
learning_rate: 2.0e-06
"""


def head_of(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def test_the_head_is_what_the_hub_takes(tmp_path):
    run = read_run(write_run(tmp_path / "run", [start(), train_line(100)], SETTINGS))
    licence = {"license": "other", "license_name": "our-own", "license_link": "https://huggingface.co/o/n/LICENSE"}
    text = card_of(run, "an adapter", Base("owner/name", is_on_hub=True, revision="v2", licence=licence))
    assert head_of(text) == {
        "base_model": "owner/name",
        "base_model_relation": "adapter",
        "library_name": "peft",
        **licence,
        "pipeline_tag": "text-generation",
        "tags": ["kto", "openkto", "lora"],
        "datasets": ["some/thumbs", "a/b"],
    }
    data = ModelCard(text).data
    assert (data.base_model, data.library_name, data.license) == ("owner/name", "peft", "other")
    assert 'from_pretrained("owner/name", revision="v2", ' in text
    whole = head_of(card_of(run, "a model", Base("owner/name", is_on_hub=True), is_merged=True))
    assert (whole["base_model_relation"], whole["library_name"]) == ("finetune", "transformers")
    assert "license" not in whole


def test_neither_paths_nor_keys_are_in_a_card(tmp_path):
    lines = [start() | {"rows": 1234}, train_line(1), {"kind": "eval", "step": 1, "eval_set": "math", "loss": 0.4}]
    text = card_of(read_run(write_run(tmp_path / "run", lines, SETTINGS)), "a model", Base("tiny"))
    assert not [secret for secret in SECRETS if secret in text]
    assert (
        "Training: `rows.jsonl`, `more.csv`, [some/thumbs](https://huggingface.co/datasets/some/thumbs), "
        "[a/b](https://huggingface.co/datasets/a/b) (`en`), 1,234 rows." in text
    )
    assert "Evaluation: `held_out.jsonl` (`math`)." in text
    assert "Evaluation: `stars.csv` (`stars`)." in text
    assert "base_model" not in head_of(text)  # its name on the Hub, if it has one, is not known
    assert "add a line `base_model: owner/name`" in text


def test_a_card_shows_settings_and_the_numbers_at_the_models_step(tmp_path):
    lines = [start(4)]
    for step in range(1, 5):
        lines.append(train_line(step, kl=step / 8))
        lines.append({"kind": "eval", "step": step, "loss": 0.4, "rewards/auc": [0, 0.5, 0.875, 0.75, 0.875][step]})
    best = f"{SETTINGS}\nkeep_best: rewards/auc\nload_best_at_end: true\n"
    run = read_run(write_run(tmp_path / "best", [*lines, summary(4)], best))
    assert model_step(run) == 2  # the first of the best two
    text = card_of(run, "a model", Base("tiny"))
    assert "The weights are those of step 2 of 4, the best by `rewards/auc`." in text
    assert "| metric | training, step 2 | evaluation, step 2 |" in text
    assert "| `rewards/auc` | 0.5 | 0.875 |" in text
    assert "| `kl` | 0.25 |  |" in text
    for row in ("| `beta` | 0.2 |", "| `max_norm` | 0.5 |", "| `learning_rate` | 2e-06 |"):
        assert row in text
    assert "adam_betas" not in text  # the default
    assert model_step(read_run(write_run(tmp_path / "last", lines, SETTINGS))) == 4


def test_a_pattern_with_a_bar_is_one_cell_of_the_table(tmp_path):
    more = "lora_rank: 8\ntarget_modules: ['.*(q|v)_proj']\n"
    run = read_run(write_run(tmp_path / "run", [start(), train_line(1)], SETTINGS + more))
    text = card_of(run, "an adapter", Base("tiny"))
    assert "| `target_modules` | .*(q&#124;v)_proj |" in text.splitlines()


def test_a_card_counts_the_rows_of_each_class_and_has_a_plot(tmp_path):
    folder = learning_run(tmp_path / "run", steps=8)
    write_card(folder, Base("tiny"))
    text = (folder / "README.md").read_text()
    assert "trained on were 2 desirable and 2 undesirable ones" in text
    assert "![Rewards over training](training.png)" in text
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")


def test_ones_own_readme_stays_and_ours_is_written_anew(tmp_path):
    folder = write_run(tmp_path / "run", [start(), train_line(1)], SETTINGS)
    write_card(folder, Base("tiny"))
    first = (folder / "README.md").read_text()
    write_card(folder, Base("other"))
    assert "# other, trained with KTO" in (folder / "README.md").read_text()
    changed = first.rpartition("<!--")[0] + "My own words.\n"
    (folder / "README.md").write_text(changed)
    write_card(folder, Base("tiny"))
    assert (folder / "README.md").read_text() == changed
    assert (folder / "MODEL_CARD.md").read_text() == first
    assert sorted(path.name for path in folder.glob("*.md")) == ["MODEL_CARD.md", "README.md"]


def test_a_record_that_was_changed_by_hand_costs_the_card_alone(tmp_path, caplog):
    folder = write_run(tmp_path / "run", [start(), {"kind": "train", "step": 1, "loss": 0.5}], "dataset: 7\n")
    write_card(folder, Base("tiny"))
    assert "the model has no card (TypeError: " in caplog.text
    assert not (folder / "README.md").exists()


# ---- the base model --------------------------------------------------------------------------------------------------


def base_folder(folder: Path, card: str | None, **config: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if card is not None:
        (folder / "README.md").write_text(card)
    return folder


@pytest.mark.parametrize(
    ("card", "config", "expected"),
    [
        ("---\nlicense: mit\n---\nA card.\n", {}, {"license": "mit"}),
        ("---\nlicense: mit\n---\n", {"license": "apache-2.0"}, {"license": "mit"}),
        (None, {"license": "apache-2.0"}, {"license": "apache-2.0"}),
        ("---\ntags: [a]\n---\n", {}, {}),
        ("---\nlicense: {broken\n---\n", {}, {}),
        ("No head.\n", {}, {}),
        (
            "---\nlicense: other\nlicense_name: llama3\nlicense_link: LICENSE\n---\n",
            {},
            {"license": "other", "license_name": "llama3"},
        ),
        (
            "---\nlicense: other\nlicense_link: https://host/terms\n---\n",
            {},
            {"license": "other", "license_link": "https://host/terms"},
        ),
    ],
)
def test_the_licence_is_the_base_models(tmp_path, card, config, expected):
    assert licence_of(str(base_folder(tmp_path / "base", card, **config))) == expected


def test_an_unknown_licence_is_said_with_what_to_add(tmp_path):
    run = read_run(write_run(tmp_path / "run", [start(), train_line(1)], SETTINGS))
    text = card_of(run, "a model", base_model(str(base_folder(tmp_path / "tiny", None))))
    assert "Unknown: `tiny` does not say under which licence it is." in text
    assert "add a line such as `license: apache-2.0` at the head of this file" in text


def test_a_folder_of_the_hubs_cache_has_its_name_on_the_hub(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = base_folder(tmp_path / f"models--some--model-1.5/snapshots/{commit}", "---\nlicense: mit\n---\n")
    assert base_model(str(folder)) == Base("some/model-1.5", True, commit, {"license": "mit"})
    assert base_model(f"{tmp_path}/") == Base(tmp_path.name)


def test_the_last_part_of_a_name():
    names = ("/a/b.csv", "b.csv", "https://u:p@h/a/b.csv?key=1", r"C:\a\b.csv", "a/b.csv/", "s3://c/b.csv#x")
    assert {last_part(name) for name in names} == {"b.csv"}
