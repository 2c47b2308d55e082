"""`openkto inspect`, `cli/inspect_data.py`: what a careful reader of all rows would say before the run."""

import json
import logging
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from openkto.config import DataConfig, RunConfig, policy_name
from openkto.config.flags import parse
from openkto.config.run_options import RunOptions
from openkto.data.report import some_rows
from openkto.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openkto.data.chosen_rows import ChosenRows
    from openkto.data.prepared_rows import PreparedRows
    from openkto.data.truncation import Limit
    from openkto.inspection.result import Inspection
    from openkto.inspection.seen import SeenRows

log = logging.getLogger(__name__)

PAGE = "inspect.html"
SAMPLES = 3  # rows of each class
LONGEST_SAMPLES = 20_000  # characters on the page


def main(argv: list[str]) -> None:
    """Look through the rows of the training run of the command line, and write what there is to say of them.

    Raises:
        OpenKTOError: something that the user can act on.
    """
    config, options = parse(argv, "inspect")
    page = Path(options.output or PAGE)
    if page.is_dir():
        raise ConfigError(f"--output: must be a page that can be written; got the folder {page}. Name a file.")
    rows_file = page.with_suffix(".rows.jsonl")
    with _opened(rows_file) as listed, tempfile.TemporaryDirectory(prefix="openkto-inspect-") as scratch:
        found, samples = inspect(config, options, Path(scratch), listed)
    from openkto.pages.inspection_page import inspection_page

    html = inspection_page(found, _shortened(samples), rows_file.name)
    try:
        page.write_text(html, encoding="utf-8")
    except OSError as error:
        raise _cannot_write(page, error) from error
    if options.json:
        print(json.dumps(asdict(found), ensure_ascii=False, indent=2))
    else:
        print(table(found))
        if options.preview:
            print(f"\n{samples}")
    log.info("the page is %s; all rows that the warnings are about are in %s", page, rows_file)
    log.info("next: %s", next_step(found))


def next_step(found: "Inspection") -> str:
    """Say what to do with the same flags, so that it does not stop at what was found here."""
    has_bad_rows = any(finding.is_bad for finding in found.findings)
    more = " and --on_bad_rows skip, or with the bad rows corrected" if has_bad_rows else ""
    return f"openkto plan and openkto train with these flags{more}; train --check says how many steps the rows make"


def inspect(config: RunConfig, options: RunOptions, scratch: Path, listed: TextIO) -> "tuple[Inspection, str]":
    """Return what is found, and some rows as the model sees them.

    Args:
        scratch: an empty folder for the words of the texts.
        listed: the file that names all rows that a warning is about.

    Raises:
        DataError: not one row is good, or fits.
    """
    # transformers imports torch with its tokenizers, but nothing here loads a model.
    from openkto.commands.holdout import warn_of_missing_classes
    from openkto.commands.rows import load_tokenizer_of, row_settings, source_settings
    from openkto.data.prepared_rows import prepare_rows
    from openkto.inspection.result import inspection_of
    from openkto.inspection.seen import SeenRows
    from openkto.models.loading import stop_token_ids

    data, name = config.data, policy_name(config.model)
    tokenizer = load_tokenizer_of(config, name)
    seen = SeenRows(tokenizer, scratch, listed)
    try:
        prepared = prepare_rows(
            data.dataset,
            tokenizer,
            row_settings(data),
            source_settings(data, data.dataset_split),
            on_bad_rows="skip",
            end_token_ids=stop_token_ids(name),
            cache_dir=data.data_cache_dir,
            watch=seen,
        )
        chosen = _choose(config, prepared, seen, is_training=True)
    except DataError as error:
        if seen.bad:
            raise DataError(f"{error} All {seen.bad.total()} bad rows are in {listed.name}.") from error
        raise
    others = None
    if data.eval_fraction is not None:
        others = _choose(config, prepared, seen, is_training=False)
        warn_of_missing_classes(others.report)
    samples = _samples(config, options, tokenizer, prepared, chosen, seen)
    weights = config.loss.desirable_loss_weight, config.loss.undesirable_loss_weight
    return inspection_of(prepared.name, seen, chosen, _limit(data), weights, others), samples  # type: ignore[arg-type]


def _choose(config: RunConfig, prepared: "PreparedRows", seen: "SeenRows", *, is_training: bool) -> "ChosenRows":
    """Return the rows to train on, or those that are held out, and log what there is to say of them.

    Raises:
        DataError: there are none.
    """
    from openkto.commands.holdout import held_out
    from openkto.data.chosen_rows import choose_rows
    from openkto.data.report import say

    choice, columns = held_out(config, is_training=is_training), seen.columns()
    is_own = None if choice is None else choice.mask(prepared.name, columns.numbers, seen.column("digest"))
    probs = config.data.dataset_probs if is_training else None
    found = choose_rows(prepared, columns, is_own, limit=_limit(config.data), probs=probs, seed=config.train.seed)
    say(found.report, config.data.max_len, with_source=is_training)
    return found


def _limit(data: DataConfig) -> "Limit":
    from openkto.data.truncation import Limit

    return Limit(data.max_len, data.truncation)  # type: ignore[arg-type]


def _samples(
    config: RunConfig,
    options: RunOptions,
    tokenizer: "PreTrainedTokenizerBase",
    prepared: "PreparedRows",
    chosen: "ChosenRows",
    seen: "SeenRows",
) -> str:
    """Return some rows of each class as the model sees them."""
    from openkto.data.preview import first_of_each_class, preview_rows
    from openkto.data.truncation import cut

    first = first_of_each_class(seen.column("label")[chosen.index], options.preview or SAMPLES)
    rows, limit = prepared.rows(chosen.index[first].tolist()), _limit(config.data)
    to_length = partial(cut, **limit._asdict(), bos_token_id=tokenizer.bos_token_id)
    has_colour = bool(options.preview) and sys.stdout.isatty() and not options.json
    return preview_rows(rows, tokenizer, to_length, limit.max_len, has_colour)


def table(found: "Inspection") -> str:
    """Return what fits a terminal: the figures, then a line for each finding with its first rows."""
    lines = [f"{some_rows(found.rows_read)} read, {found.rows_kept} to train on: {found.name}", ""]
    lines += [f"classes: {found.balance}"]
    if found.balance_warning:
        lines.append(f"warning: {found.balance_warning}")
    if found.held_out is not None:
        lines.append(f"--eval_fraction: {found.held_out}")
    lines += [
        f"weights that balance them: desirable {found.weights['desirable']:.4g}, "
        f"undesirable {found.weights['undesirable']:.4g}",
        f"  so that {found.formula}",
        f"label errors: {found.label_measure}",
        "",
        f"{'tokens':20}" + "".join(f"{name:>14}" for name in found.lengths),
    ]
    for what in dict.fromkeys(what for of_class in found.lengths.values() for what in of_class):
        lines.append(f"{what:20}" + "".join(f"{of_class.get(what, 0):>14}" for of_class in found.lengths.values()))
    lines.append("")
    for finding in found.findings:
        lines.append(f"{'warning' if finding.is_warning else 'note'}: {finding.kind}: {finding.count}: {finding.text}.")
        if finding.is_warning:
            lines += [f"    {row}" for row in finding.first]
    for reason, count in found.unlabelled.items():
        lines.append(f"note: left out: {some_rows(count)} {reason}.")
    if not any(finding.is_warning for finding in found.findings):
        lines.append("nothing else to warn of." if found.balance_warning else "nothing to warn of in the rows.")
    return "\n".join(lines)


def _shortened(samples: str) -> str:
    return samples if len(samples) <= LONGEST_SAMPLES else f"{samples[:LONGEST_SAMPLES]} ..."


def _opened(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8", errors="replace")
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--output: must be a page that can be written; got {path} ({error.strerror}). Name another.")
