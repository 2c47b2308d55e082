"""Prints docs/flags.md from the settings themselves: `python docs/make_flags.py > docs/flags.md`."""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from openkto.config import SECTIONS, default_text, settings
from openkto.config.flags import MERGE, PLAN_ONLY, TITLES, TRAIN_ONLY
from openkto.config.run_options import RunOptions
from openkto.config.values import in_bounds, is_list, kind_of, rule

HEAD = """# Flags

Written by `python docs/make_flags.py > docs/flags.md`; a test holds it to the code.

Each name is a flag (`--beta 0.1`) and a key of a YAML file (`beta: 0.1`) that is given with `--config FILE`. A flag
overrides the file, wherever it stands on the command line. A boolean flag needs no value. Separate the items of a list
by spaces or commas; in YAML, write a YAML list. Relative paths in a file start from the folder in which the command
runs. `openkto evaluate` takes the flags marked *both*; in a YAML file it ignores the others, so one `run.yaml` serves
both commands. What you do not give, `evaluate` takes from the `run.yaml` next to the model, and says so: the reference,
how rows are read (but not which rows), the loss and `--param_dtype`.

`openkto precompute_reference` takes the same flags as `openkto train`. `openkto merge_lora` takes @MERGE@.

`--use_wandb` never takes a key: set `WANDB_API_KEY`, or run `wandb login`. `WANDB_MODE=offline` writes the numbers to
`<save_path>/wandb` only.
"""


def row(item: dataclasses.Field, command: str) -> str:
    known = item.metadata["option"]
    may_be = rule(item) if is_list(item) or "str" in kind_of(item) else in_bounds(item) or rule(item)
    cells = (f"`--{item.name}`", default_text(item), known.unit, may_be, command, known.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    header = "| flag | default | unit | may be | command | meaning |\n| --- | --- | --- | --- | --- | --- |"
    names = [f"`--{name}`" for name in settings() if name in MERGE]
    lines = [HEAD.replace("@MERGE@", f"{', '.join(names[:-1])} and {names[-1]}")]
    for name, section in SECTIONS.items():
        lines += [f"## {TITLES[name][0].upper()}{TITLES[name][1:]}\n", header]
        lines += [row(item, "train" if item.name in TRAIN_ONLY else "both") for item in dataclasses.fields(section)]
        lines.append("")
    lines += [
        "## This start of the program\n",
        "Only flags: they are not part of the run and not written to `run.yaml`.\n",
        header,
    ]
    options = [item for item in dataclasses.fields(RunOptions) if item.metadata]
    one = {"output": "evaluate, inspect", "json": "inspect, plan", "openrlhf_defaults": "train"}
    one |= dict.fromkeys(PLAN_ONLY, "plan")
    lines += [row(item, one.get(item.name, "both")) for item in options]
    lines += ["", "## What differs from OpenRLHF 0.9\n"]
    lines += ["Its 65 flags keep their names and meaning; these defaults differ.\n"]
    lines += ["| flag | OpenRLHF | here |", "| --- | --- | --- |"]
    for name, item in settings().items():
        if item.metadata["option"].openrlhf:
            lines.append(f"| `--{name}` | {item.metadata['option'].openrlhf} | {default_text(item)} |")
    lines.append("| `--pretrain` | bigscience/bloomz-1b7 | required |")
    lines.append("| `--use_wandb` | an API key | on or off |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
