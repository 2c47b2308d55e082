"""The JSON schema of the YAML files allows what OpenKTO reads, and refuses what it does not."""

import re
from pathlib import Path

import pytest
import yaml

from openkto.commands import schema as command
from openkto.config import settings, to_yaml
from openkto.config.flags import parse
from openkto.config.schema import schema
from openkto.errors import ConfigError

jsonschema = pytest.importorskip("jsonschema")

CONFIGS = Path(__file__).parent.parent.parent / "configs"


class Yaml12(yaml.SafeLoader):
    """Reads YAML as editors do, by version 1.2: 1e-6 is a number there, and on is text."""


Yaml12.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith((":bool", ":float"))]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Yaml12.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(true|false)$"), list("tf"))
Yaml12.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?[eE][-+]?\d+|\d+\.\d*|\.\d+)$"), list("-+0123456789.")
)


def problems(text: str) -> list[str]:
    document = yaml.load(text, Loader=Yaml12)
    return [error.message for error in jsonschema.Draft202012Validator(schema()).iter_errors(document)]


def test_the_schema_is_one_and_has_every_setting_with_its_meaning():
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["properties"].keys() == settings().keys()
    assert all(len(one["description"]) > 10 for one in schema()["properties"].values())


@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_ready_run_is_valid_and_names_the_schema(file):
    text = file.read_text()
    assert problems(text) == []
    (named,) = re.findall(r"^# yaml-language-server: \$schema=(\S+)$", text, re.MULTILINE)
    assert (file.parent / named).resolve() == CONFIGS / "openkto.schema.json"


def test_the_schema_beside_the_ready_runs_is_the_printed_one(capsys):
    command.main([])
    assert capsys.readouterr().out == (CONFIGS / "openkto.schema.json").read_text()


def test_a_resolved_run_is_valid():
    config, _ = parse(["--pretrain", "m", "--dataset", "a", "--adam_betas", "0.9", "0.95"], "train")
    assert problems(to_yaml(config)) == []


# A line of YAML, and whether OpenKTO reads it.
LINES = [
    ("learning_rate: 1e-6", True),
    ("learning_rate: -1", False),
    ("beta: much", False),
    ("train_batch_size: 128", True),
    ("train_batch_size: 0", False),
    ("train_batch_size: 1.5", False),
    ("loss_type: bco", True),
    ("loss_type: dpo", False),
    ("use_wandb: on", True),
    ("use_wandb: maybe", False),
    ("gradient_checkpointing: true", True),
    ("gradient_checkpointing: selective", True),
    ("max_tokens_per_micro_batch: auto", True),
    ("max_tokens_per_micro_batch: some", False),
    ("desirable_loss_weight: auto", True),
    ("max_time: 0:03:55:00", True),
    ("max_time: 3h", False),
    ("load_checkpoint: out/best", True),
    ("adam_betas: [0.9, 0.95]", True),
    ("adam_betas: [0.9]", False),
    ("max_steps: null", True),
    ("beta: null", False),
    ("input_key: question", True),
    ("bta: 0.1", False),
    ("dataset: [{path: stars.csv, label_key: stars}]", True),
    ("dataset: one.jsonl", True),
    ("chat_template_kwargs: {enable_thinking: false}", True),
]


@pytest.mark.parametrize(("line", "is_read"), LINES, ids=[line for line, _ in LINES])
def test_a_line_is_valid_where_it_is_read(line, is_read, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(line)
    argv = ["--config", str(file), "--pretrain", "m"] + ([] if line.startswith("dataset") else ["--dataset", "a"])
    try:
        parse(argv, "train")
        read = True
    except ConfigError:
        read = False
    assert (read, problems(line) == []) == (is_read, is_read)
