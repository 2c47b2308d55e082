"""What `openkto evaluate` takes from the run.yaml beside a trained model: what it was trained from, and how rows are
read and measured.

Not taken: which rows, how fast, and --trust_remote_code, as a folder from elsewhere must not start its own code.
"""

import dataclasses
import os

from openkto.config import DataConfig, LossConfig, default_text, is_adapter_folder, settings
from openkto.config.values import Given

# Which rows there are: those of the run are not those to evaluate on.
WHICH_ROWS = ("dataset", "eval_", "max_samples", "on_bad_rows", "data_cache_dir")
TAKEN = {
    item.name
    for section in (DataConfig, LossConfig)
    for item in dataclasses.fields(section)
    if not item.name.startswith(WHICH_ROWS) and item.name != "aux_loss_coef"
} | {"ref_pretrain", "ref_revision", "param_dtype", "disable_fast_tokenizer", "load_in_4bit"}


def run_file_of(given: dict[str, Given]) -> str | None:
    """Return the run.yaml in the folder of the model to evaluate, or nothing where there is none."""
    model = given["pretrain"].raw if "pretrain" in given else None
    file = os.path.join(os.path.expanduser(model), "run.yaml") if isinstance(model, str) else ""
    return file if os.path.isfile(file) else None


def settings_of_run(of_run: dict[str, Given], given: dict[str, Given]) -> dict[str, Given]:
    """Return the settings that are taken from a run: those that are not given.

    What the run started from is the reference, except for an adapter of a whole model: there it is the adapter's base.
    """
    found = {name: one for name, one in of_run.items() if name in TAKEN}
    start, model = of_run.get("pretrain"), str(given["pretrain"].raw)
    if start is not None and (not is_adapter_folder(model) or is_adapter_folder(str(start.raw))):
        if "ref_pretrain" not in found and "ref_revision" not in found and "revision" in of_run:
            found["ref_revision"] = of_run["revision"]
        found.setdefault("ref_pretrain", Given(start.place, start.raw))
    if "ref_pretrain" in given or "ref_pretrain" not in found:
        found.pop("ref_revision", None)  # a revision goes with its name
    return {name: one for name, one in found.items() if name not in given}


def describe(file: str | None, of_run: dict[str, Given]) -> str | None:
    """Say in a line what was taken and is not the default anyway; None where there is nothing to say."""
    texts = {name: " ".join(one.raw) if isinstance(one.raw, list) else str(one.raw) for name, one in of_run.items()}
    told = [f"{name} {text}" for name, text in texts.items() if text.lower() not in (_default(name), "none")]
    return f"from {file}, as no flag says otherwise: {', '.join(told)}" if told else None


def _default(name: str) -> str:
    item = settings()[name]
    return str(item.default).lower() if isinstance(item.default, bool) else default_text(item)
