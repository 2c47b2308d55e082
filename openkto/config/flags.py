"""Reads a run from the command line and a YAML file: `parse(argv, command)`.

Flags and YAML keys have one flat set of names, those of `openkto/config`; a flag overrides the file. Every value
arrives as text and is turned into its type in one place, so `1e-6` or `on` means the same in both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Literal

import yaml

from openkto import __version__
from openkto.config import (
    SECTIONS,
    Option,
    RunConfig,
    default_text,
    from_flat,
    option_of,
    settings,
)
from openkto.config.checks import check
from openkto.config.foreign_flags import advice_on
from openkto.config.run_file import describe, run_file_of, settings_of_run
from openkto.config.run_options import RunOptions
from openkto.config.values import Given, Raw, convert, is_list, kind_of, rule
from openkto.errors import ConfigError
from openkto.process.limits import check_plain

Command = Literal["inspect", "plan", "train", "precompute_reference", "evaluate", "merge_lora", "convert_checkpoint"]

# What must be given.
REQUIRED: dict[Command, tuple[str, ...]] = {
    "inspect": ("pretrain", "dataset"),
    "plan": ("pretrain",),
    "train": ("pretrain", "dataset"),
    "precompute_reference": ("pretrain", "dataset"),
    "evaluate": ("pretrain", "eval_dataset"),
    "merge_lora": ("pretrain", "save_path"),
    "convert_checkpoint": ("load_checkpoint", "pretrain", "save_path"),
}

# What each command does, in `openkto --help` and in its own.
DESCRIPTIONS: dict[str, str] = {
    "inspect": "Look through the rows before a run: lengths, duplicates, bad rows, likely label errors. "
    "Takes the run's own flags, loads no model and trains nothing.",
    "plan": "Say what a run will take: memory by part, time, and which settings fit. Takes the run's own flags, which "
    "stay; the others are searched. Loads no weights.",
    "train": "Train a language model from thumbs-up / thumbs-down rows with KTO.",
    "precompute_reference": "Compute the reference's log-probabilities ahead of a training run with --ref_mode cached. "
    "Give it the run's own flags.",
    "evaluate": "Compare a model with its reference on labelled rows: loss, kl, rewards, auc, accuracy.",
    "report": "Show a run's curves, what they mean and its likely label errors on one HTML page. Several runs are "
    "shown side by side. The run may still be training.",
    "merge_lora": "Add a LoRA adapter (--pretrain) to its base model and write the whole model to --save_path.",
    "convert_checkpoint": "Write the model or adapter of a checkpoint (--load_checkpoint) to --save_path. --pretrain "
    "is the model that training started from: its configuration, tokenizer and frozen weights are used.",
    "push": "Upload the model or adapter of a folder, with its model card, to the Hugging Face Hub.",
    "schema": "Print the JSON schema of the YAML files, by which editors complete and check them.",
    "completion": "Print what bash or zsh needs to complete this command line: source <(openkto completion bash)",
}

USAGE = {
    "pretrain": "MODEL",
    "dataset": "ROWS",
    "eval_dataset": "ROWS",
    "save_path": "FOLDER",
    "load_checkpoint": "FOLDER",
}

TITLES = {
    "model": "model",
    "lora": "LoRA",
    "data": "data",
    "loss": "loss",
    "optim": "optimizer and schedule",
    "deepspeed": "DeepSpeed",
    "train": "batches and steps",
    "samples": "answers during training",
    "output": "output and trackers",
    "checkpoint": "checkpoints and stops",
}

# What is a JSON object on the command line and may be a mapping in a YAML file.
MAPPINGS = ("chat_template_kwargs",)

# A boolean flag may stand alone.
SWITCH = {"nargs": "?", "const": "true"}

# What `evaluate` does not use.
TRAIN_ONLY = {name for name in settings() if option_of(name).train_only} | {"openrlhf_defaults"}

PLAN_ONLY = {"gpus", "gpu_memory", "tflops"}
# All that the commands take which make one folder out of another.
MERGE = {
    *("pretrain", "save_path", "overwrite", "export_dtype", "trust_remote_code", "disable_fast_tokenizer"),
    *("config", "debug", "verbose"),
}
ALL_OF: dict[Command, set[str]] = {
    "merge_lora": MERGE | {"push_to_hub", "hub_public"},
    "convert_checkpoint": MERGE | {"load_checkpoint", "revision"},
}

# What all of OpenRLHF's scripts spell out: whoever comes with one wants to know which defaults are others here.
OPENRLHF_SCRIPT = {"save_steps", "logging_steps", "eval_steps"}


def parse(argv: list[str], command: Command) -> tuple[RunConfig, RunOptions]:
    """Return the checked run and the options of this start.

    Raises:
        ConfigError: for anything wrong on the command line or in the file, as one sentence with its place.
    """
    flags = _read_flags(argv, command)
    option_fields = {item.name: item for item in dataclasses.fields(RunOptions) if item.metadata}
    options = {name: convert(option_fields[name], flags.pop(name)) for name in option_fields if name in flags}
    if flags.keys() >= OPENRLHF_SCRIPT or "use_ds_universal_ckpt" in flags:
        options.setdefault("openrlhf_defaults", True)
    given = (_read_yaml(options["config"]) if "config" in options else {}) | flags
    known = settings()
    note = None
    if command == "evaluate":
        file = run_file_of(given)
        of_run = {} if file is None else settings_of_run(_read_yaml(file), given)
        note, given = describe(file, of_run), of_run | given
    values = {name: convert(known[name], one) for name, one in given.items()}
    if command == "evaluate" and values.get("zero_stage") == 0:
        # Without an optimizer stages 0 to 2 are one; the autocast of stage 0 is for training.
        values["zero_stage"] = 1

    def place(name: str) -> str:
        return given[name].place if name in given else f"--{name}"

    for name in REQUIRED[command]:
        if not values.get(name):
            raise ConfigError(
                f"{place(name)}: is required; got nothing. Give --{name}, or {name} in the --config file."
            )
    config = from_flat(values)
    warnings = check(config, place, command)
    return config, RunOptions(**options, given=frozenset(given), note=note, warnings=tuple(warnings))


def _read_flags(argv: list[str], command: Command) -> dict[str, Given]:
    """Return the flags by name; `--help` and `--version` print and exit with 0."""
    parser = parser_of(command)
    _check_names(argv, command)
    # argparse takes -1=false of --label_map for a flag, and not what begins with a blank.
    words = [f" {word}" if re.match(r"-[\d.]+=", word) else word for word in argv]
    try:
        found, strays = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        missing = re.match(r"argument --(\w+): expected", str(error))
        if missing:
            name = missing[1]
            raise ConfigError(
                f"--{name}: needs a value; got none. Give one; write --{name}=VALUE if it begins with a dash."
            ) from None
        raise ConfigError(f"command line: must be flags with their values; got {error}. See --help.") from None
    if strays:
        cure = "See --help."
        if strays[0].endswith((".yaml", ".yml")):
            cure = f"Write --config {strays[0]} for a file of settings."
        elif strays[0].endswith((".csv", ".tsv", ".json", ".jsonl", ".parquet")):
            cure = f"Write --{'eval_' if command == 'evaluate' else ''}dataset {strays[0]} for a file of rows."
        raise ConfigError(f"command line: a value must follow its flag; got {' '.join(strays)!r}. {cure}")
    return {name: Given(f"--{name}", raw) for name, raw in vars(found).items()}


def parser_of(command: Command) -> argparse.ArgumentParser:
    """Return the parser of one command; it only takes the command line apart, types come later."""
    parser = argparse.ArgumentParser(
        prog=f"openkto {command}",
        usage=f"openkto {command} [--config FILE] "
        f"{' '.join(f'[--{name} {USAGE[name]}]' for name in REQUIRED[command])} [--flag value ...]",
        description=DESCRIPTIONS[command],
        epilog="A boolean flag needs no value; true or false may follow it. Every setting is also a key in YAML. "
        "Most runs need few: --pretrain, --dataset, --save_path, and of a table --input_key, --output_key and "
        "--label_key; docs/settings.md says what to choose.",
        argument_default=argparse.SUPPRESS,  # only what is given
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    offered = _offered(command)
    for item in dataclasses.fields(RunOptions):
        if item.name in offered:
            _add_flag(parser, item)
    for name, section in SECTIONS.items():
        group = parser.add_argument_group(TITLES[name])
        for item in dataclasses.fields(section):
            if item.name in offered:
                _add_flag(group, item)
    return parser


def _add_flag(group: Any, item: dataclasses.Field[Any]) -> None:
    known: Option = item.metadata["option"]
    kind = kind_of(item)
    metavars = {"int": "N", "bool": "true|false", "str": "TEXT", "list[str]": "NAME"}
    metavar = "PATH" if known.is_path else "NAME" if known.choices else metavars.get(kind, "NUMBER")
    many: dict[str, Any] = SWITCH if kind in ("bool", "bool | str") else {"nargs": "+"} if is_list(item) else {}
    choices = f"; {rule(item)}" if known.choices else ""
    unit = f" [{known.unit}]" if known.unit else ""
    text = f"{known.help}{choices}{unit} (default: {default_text(item)})"
    group.add_argument(f"--{item.name}", type=str, metavar=metavar, help=text.replace("%", "%%"), **many)


def _offered(command: Command) -> set[str]:
    if command in ALL_OF:
        return ALL_OF[command]
    names = settings().keys() | {item.name for item in dataclasses.fields(RunOptions) if item.metadata}
    lacks: dict[Command, set[str]] = {
        "inspect": {"check", "openrlhf_defaults"},
        "plan": {"check", "preview", "output", "openrlhf_defaults"},
        "train": {"output", "json"},
        "evaluate": TRAIN_ONLY | {"json"},
        "precompute_reference": {"output", "json", "openrlhf_defaults"},
    }
    return names - lacks[command] - (set() if command == "plan" else PLAN_ONLY)


def _check_names(argv: list[str], command: Command) -> None:
    """Refuse unknown flags by name, before the parser sees their values (one of them may be a key)."""
    lists = {name for name, item in settings().items() if is_list(item)}
    offered = _offered(command) | {"help", "version"}
    seen: set[str] = set()
    unknown: dict[str, str] = {}
    for token in argv:
        is_flag = token.startswith("--") or (re.match("-[A-Za-z]", token) and " " not in token)
        if not is_flag or token == "-h":
            continue
        dashed = token.partition("=")[0]
        name = dashed.lstrip("-")
        if name in settings() and name not in offered:
            other = "training" if name in TRAIN_ONLY else "train and evaluate"
            raise ConfigError(f"{dashed}: belongs to {other}; got it for {command}. Leave it out.")
        if name not in offered or not token.startswith("--"):
            unknown[dashed] = advice_on(name, offered)
            continue
        if name in seen and name in {*lists, "config"}:
            cure = "Put all its values after one." if name in lists else "Give one file."
            raise ConfigError(f"{dashed}: may be given only once; got it twice. {cure}")
        seen.add(name)
    if unknown:
        (first, advice), *others = unknown.items()
        raise ConfigError(f"{first}: must be a flag of openkto {command}; got an unknown one. {advice}{_more(others)}")


def _read_yaml(path: str) -> dict[str, Given]:
    """Return the keys of a flat YAML mapping with their values as text.

    The file is read as nodes, not as YAML 1.1 values: there 1e-6 is a string, 010 is eight and a later key silently
    wins over an earlier one of the same name.
    """
    try:
        check_plain("--config", path)
        root = yaml.compose(Path(path).read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"--config: must be a YAML file; got {path!r} ({error.strerror}). Check the path.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: must be UTF-8 text; got other bytes. Save it as UTF-8.") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        line = f":{mark.line + 1}" if mark else ""
        what = error.problem if isinstance(error, yaml.MarkedYAMLError) else "text that YAML cannot hold"
        raise ConfigError(f"{path}{line}: must be YAML; got an error there: {what}. Correct the line.") from None
    if not isinstance(root, yaml.MappingNode):
        got = "nothing" if root is None else "a list" if isinstance(root, yaml.SequenceNode) else "plain text"
        raise ConfigError(f"{path}: must hold lines of the form 'name: value'; got {got}. See configs/ for examples.")
    found: dict[str, Given] = {}
    known = set(settings())
    unknown: dict[str, str] = {}
    for key_node, value_node in root.value:
        key = str(key_node.value)
        place = f"{path}: {key}"
        if key not in known and isinstance(value_node, yaml.MappingNode):
            raise ConfigError(
                f"{place}: must be a setting; got a section. Write its settings without it: names are flat."
            )
        if key not in known:
            unknown[key] = advice_on(key, known, as_keys=True)
            continue
        if key in found:
            line = key_node.start_mark.line + 1
            raise ConfigError(f"{path}:{line}: a key may be given only once; got {key!r} again. Keep one of the two.")
        if key in MAPPINGS and isinstance(value_node, yaml.MappingNode):
            found[key] = Given(place, json.dumps(yaml.SafeLoader("").construct_document(value_node), default=str))
            continue
        found[key] = Given(place, _plain(value_node, place))
    if unknown:
        (first, advice), *others = unknown.items()
        raise ConfigError(f"{path}: {first}: must be a setting; got an unknown name. {advice}{_more(others)}")
    return found


def _more(others: list[tuple[str, str]]) -> str:
    """Say the same of other unknown names: all of another trainer's in one answer, not in one start each."""
    return f" Unknown too: {' '.join(f'{name}: {advice}' for name, advice in others)}" if others else ""


def _entry(node: yaml.Node, place: str) -> str:
    """Return an entry of a list of datasets as text; a mapping, which has settings of its own, as its JSON."""
    if isinstance(node, yaml.MappingNode):
        members = {str(key.value): _member(value, place) for key, value in node.value}
        return json.dumps(members, ensure_ascii=False)
    return str(_plain(node, place))


def _member(node: yaml.Node, place: str) -> Raw | dict[str, Raw]:
    """Return what a mapping says under one name; label_map may be a mapping itself."""
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _plain(value, place) for key, value in node.value}
    return _plain(node, place)


def _plain(node: yaml.Node, place: str) -> Raw:
    """Return a YAML value as text, a list of texts, or None for null."""
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag.endswith(":null") else str(node.value)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [str(item.value) for item in node.value]
    if place.endswith((": dataset", ": eval_dataset")):
        if isinstance(node, yaml.MappingNode):
            return _entry(node, place)
        return [_entry(item, place) for item in node.value]
    raise ConfigError(
        f"{place}: must be a value or a list of values; got something nested. Names are flat, see --help."
    )
