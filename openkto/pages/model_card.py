"""The model card of a run: README.md beside the model, with what the Hub expects at its head, and a plot.

It names what is on the Hub as the Hub does and anything else by its last part: whoever reads the card has neither the
paths nor the rows.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openkto.config import HIGHER_IS_BETTER, path_of_entry, split_eval_set
from openkto.config.model import LoraConfig, LossConfig
from openkto.config.training import OptimConfig
from openkto.data.sources import hub_match
from openkto.pages.charts import charts_of
from openkto.pages.page import png_of
from openkto.pages.run_files import Line, RunRecord
from openkto.report.markdown import markdown_table

PLOT = "training.png"
PLOTTED = ("rewards", "auc", "loss")  # the first that the run has values for
FEWEST_LINES = 5  # of training: a plot of fewer shows nothing
THIS_FOLDER = "path/to/this/folder"  # stands in the card until it is known where the model is read from
METRICS = (
    *("loss", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/auc", "rewards/accuracy"),
    *("logps/chosen", "logps/rejected"),
)
PACKAGES = ("openkto", "torch", "transformers", "deepspeed", "peft")
# Settings that are shown whatever they are; others of the loss, the optimizer and LoRA where they are not the default.
SHOWN = (
    *("loss_type", "beta", "desirable_loss_weight", "undesirable_loss_weight", "learning_rate", "lr_scheduler"),
    *("lr_warmup_ratio", "train_batch_size", "max_epochs", "max_steps", "max_len", "truncation", "seed"),
    *("param_dtype", "lora_rank"),
)
ADAPTER_CODE = """
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained(@BASE@, dtype="auto", device_map="auto")
model = PeftModel.from_pretrained(base, "@HERE@")
tokenizer = AutoTokenizer.from_pretrained("@HERE@")
"""
MODEL_CODE = """
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("@HERE@", dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("@HERE@")
"""
MEANINGS = (
    "Rewards are `beta` times the log-ratio of model and reference. `rewards/auc` is the probability that a desirable "
    "row has the larger reward (0.5 is chance), `rewards/accuracy` the share of rows on their label's side of the "
    "reference point, `kl` that point in nats."
)


@dataclass(frozen=True)
class Base:
    """The model that training started from; of an adapter, what it is added to.

    Args:
        name: how it is called: on the Hub its name there, or else the last part of its path.
        is_on_hub: whether the name is the Hub's.
        licence: license, license_name and license_link, as the model's own card has them.
    """

    name: str
    is_on_hub: bool = False
    revision: str | None = None
    licence: Mapping[str, Any] = field(default_factory=dict)


def card_of(run: RunRecord, kind: str, base: Base, *, is_merged: bool = False, has_plot: bool = False) -> str:
    """Return the text of the card.

    Args:
        run: what the run left.
        kind: of what lies in the folder, "a model" or "an adapter".
        is_merged: the model is that of an adapter and its base.
        has_plot: whether the plot lies beside the card.
    """
    has_adapter = is_merged or kind == "an adapter"
    parts = [
        _head(run, kind, base, has_adapter=has_adapter),
        f"# {last_part(base.name)}, trained with KTO",
        _introduction(run, kind, base, is_merged=is_merged),
        "## How to load it",
        _loading(kind, base),
        "## Data",
        _data(run),
        "## Results",
        _results(run),
        MEANINGS,
        *([f"![Rewards over training]({PLOT})"] if has_plot else []),
        "## Settings",
        _settings(run, has_adapter=has_adapter),
        _made_with(run),
        "## Licence",
        _licence(base),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def plot_of(run: RunRecord) -> bytes | None:
    """Return the run's rewards, or what it has instead, as a PNG picture; None for a run of a few steps."""
    if len(run.train) < FEWEST_LINES:
        return None
    charts = {chart.key: chart for chart in charts_of([run], [run.name])}
    return next((png_of(charts[key]) for key in PLOTTED if key in charts), None)


def last_part(name: str) -> str:
    """Return the last part of a path, or of an address without what may be a key."""
    return re.split(r"[?#]", name)[0].rstrip("/\\").rpartition("/")[2].rpartition("\\")[2]


def model_step(run: RunRecord) -> int | None:
    """Return the step whose model the run left: its last, or the best one where it was told to leave that."""
    metric = str(run.settings.get("keep_best"))
    first_set = next(iter(run.evaluations.values()), [])
    known = [line for line in first_set if line["step"] > 0 and isinstance(line.get(metric), (int, float))]
    if run.settings.get("load_best_at_end") and known:
        sign = 1 if HIGHER_IS_BETTER[metric] else -1
        return int(max(known, key=lambda line: sign * line[metric])["step"])
    return int(run.train[-1]["step"]) if run.train else None


# ---- the parts -------------------------------------------------------------------------------------------------------


def _head(run: RunRecord, kind: str, base: Base, *, has_adapter: bool) -> str:
    """Return the card's front matter: each value in JSON, which is YAML too."""
    found = [hub_match(path_of_entry(str(entry))) for entry in run.settings.get("dataset") or []]
    values: dict[str, Any] = {}
    if base.is_on_hub:
        values["base_model"] = base.name
        values["base_model_relation"] = "adapter" if kind == "an adapter" else "finetune"
    values["library_name"] = "peft" if kind == "an adapter" else "transformers"
    values |= base.licence
    values["pipeline_tag"] = "text-generation"
    values["tags"] = ["kto", "openkto", *(["lora"] if has_adapter else [])]
    names = list(dict.fromkeys(match[1] for match in found if match is not None))
    if names:
        values["datasets"] = names
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    return "\n".join(["---", *lines, "---"])


def _introduction(run: RunRecord, kind: str, base: Base, *, is_merged: bool) -> str:
    of = f"[{base.name}](https://huggingface.co/{base.name})" if base.is_on_hub else f"`{base.name}`"
    if base.revision is not None:
        of += f" at `{base.revision}`"
    what = f"an adapter for {of}" if kind == "an adapter" else of
    text = (
        f"This is {what}, trained on answers with a thumbs-up or a thumbs-down by Kahneman-Tversky Optimization "
        "([KTO](https://arxiv.org/abs/2402.01306)) with OpenKTO."
    )
    if is_merged:
        text += " An adapter was trained and then added to the model's weights."
    step = model_step(run)
    if step is None:
        return text
    total = f" of {run.total_steps}" if run.total_steps is not None else ""
    best = f", the best by `{run.settings['keep_best']}`" if run.settings.get("load_best_at_end") else ""
    return f"{text} The weights are those of step {step}{total}{best}."


def _loading(kind: str, base: Base) -> str:
    if kind != "an adapter":
        return f"```python{MODEL_CODE.replace('@HERE@', THIS_FOLDER)}```"
    name = json.dumps(base.name if base.is_on_hub else f"path/to/{base.name}", ensure_ascii=False)
    if base.revision is not None:
        name += f", revision={json.dumps(base.revision)}"
    return f"```python{ADAPTER_CODE.replace('@HERE@', THIS_FOLDER).replace('@BASE@', name)}```"


def _data(run: RunRecord) -> str:
    entries = [_shown_data(path_of_entry(str(entry))) for entry in run.settings.get("dataset") or []]
    lines = [f"- Training: {', '.join(entries) or 'not known'}{_counts(run)}."]
    fraction = run.settings.get("eval_fraction")
    if fraction is not None:
        lines.append(f"- Evaluation: {fraction:g} of these rows, which were not trained on.")
    for entry in run.settings.get("eval_dataset") or []:
        name, path = split_eval_set(str(entry))
        lines.append(f"- Evaluation: {_shown_data(path_of_entry(path))} (`{last_part(name)}`).")
    return "\n".join(lines)


def _counts(run: RunRecord) -> str:
    rows = run.starts[-1].get("rows") if run.starts else None
    text = f", {rows:,} rows" if isinstance(rows, int) else ""
    if run.rewards is not None:
        label_of = dict(zip(run.rewards.row.tolist(), run.rewards.is_desirable.tolist(), strict=True))
        desirable = sum(label_of.values())
        text += f"; trained on were {desirable:,} desirable and {len(label_of) - desirable:,} undesirable ones"
    return text


def _shown_data(name: str) -> str:
    found = hub_match(name)
    if found is None:
        return f"`{last_part(name)}`"
    return f"[{found[1]}](https://huggingface.co/datasets/{found[1]})" + (f" (`{found[2]}`)" if found[2] else "")


def _results(run: RunRecord) -> str:
    """Return the metrics at the model's step: of training, and of each evaluation set's newest evaluation by then."""
    step = model_step(run)
    if step is None:
        return "The run left no metrics."
    several = len(run.evaluations) > 1
    sets = {
        f"evaluation `{last_part(name)}`" if several else "evaluation": found for name, found in run.evaluations.items()
    }
    newest: dict[str, Line] = {}
    for title, lines in ({"training": run.train} | sets).items():
        by_then = [line for line in lines if line["step"] <= step]
        if by_then:
            newest[f"{title}, step {by_then[-1]['step']}"] = by_then[-1]
    rows = [[f"`{name}`", *(_number(line.get(name)) for line in newest.values())] for name in METRICS]
    return markdown_table(["metric", *newest], [row for row in rows if any(row[1:])])


def _settings(run: RunRecord, *, has_adapter: bool) -> str:
    defaults = {item.name: item for part in (LossConfig, OptimConfig, LoraConfig) for item in dataclasses.fields(part)}
    known = run.settings
    changed = [name for name, item in defaults.items() if name in known and known[name] != _default(item)]
    shown = [name for name in dict.fromkeys((*SHOWN, *changed)) if known.get(name) not in (None, [])]
    if not has_adapter:
        shown = [name for name in shown if name != "lora_rank"]
    return markdown_table(["setting", "value"], [[f"`{name}`", _value(known[name])] for name in shown])


def _default(item: "dataclasses.Field[Any]") -> Any:
    value = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    return list(value) if isinstance(value, tuple) else value


def _made_with(run: RunRecord) -> str:
    if not run.starts:
        return ""
    last = run.starts[-1]
    versions = [f"{package} {last[package]}" for package in PACKAGES if package in last]
    device = f"; {last['world_size']} x {last['device']}" if "device" in last and "world_size" in last else ""
    rest = "Other settings of the loss, the optimizer and LoRA are at their defaults."
    return f"{rest} Made with {', '.join(versions)}{device}."


def _licence(base: Base) -> str:
    found = base.licence.get("license")
    if found is not None:
        text = f"The base model's: {base.licence.get('license_name') or _value(found)}. See there for its terms."
    else:
        text = (
            f"Unknown: `{base.name}` does not say under which licence it is. Find out, and add a line such as "
            "`license: apache-2.0` at the head of this file before you share the model."
        )
    if not base.is_on_hub:
        text += " If the base model is on the Hub, also add a line `base_model: owner/name` with its name there."
    return text


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else ""


def _value(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
