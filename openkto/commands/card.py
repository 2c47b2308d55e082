"""Writes the model card beside a run's model."""

import logging
import os
import re
from pathlib import Path

from openkto.commands.folder import write_beside_model
from openkto.distributed.checkpoint_folder import HF_SUFFIX
from openkto.models.licence import licence_of
from openkto.models.model_files import CARD, CARD_MARK, kind_of_model
from openkto.models.revision import split_revision
from openkto.pages.model_card import PLOT, Base, card_of, last_part, plot_of
from openkto.pages.run_files import read_run, run_until
from openkto.trainer.callbacks import Callback

log = logging.getLogger(__name__)

OTHER_CARD = "MODEL_CARD.md"  # where README.md is somebody's own
# A folder of the Hub's cache: models--owner--name/snapshots/commit.
SNAPSHOT = re.compile(r"/models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})")


def base_model(name: str) -> Base:
    """Return how a card speaks of the model that training started from.

    Args:
        name: a folder, or a Hub name with or without a revision.
    """
    if not os.path.isdir(name):
        repository, revision = split_revision(name)
        return Base(repository, True, revision, licence_of(name))
    path = os.path.abspath(name)
    cached = SNAPSHOT.search(path)
    if cached is not None:
        return Base(f"{cached['owner']}/{cached['name']}", True, cached["commit"], licence_of(name))
    return Base(last_part(path), licence=licence_of(name))


def write_card(
    folder: Path, base: Base, *, of_run: Path | None = None, step: int | None = None, is_merged: bool = False
) -> None:
    """Write the card of the model or adapter in a folder, with its plot; for one rank.

    A card that somebody wrote, or changed and took OpenKTO's line out of, stays as it is.

    Args:
        of_run: the run's folder, where that is another one.
        step: whose model it is; None is the one that the run left.
        is_merged: the model is an adapter's that was merged into its base.
    """
    try:
        run = read_run(of_run or folder)
        if step is not None:
            run = run_until(run, step)
        plot = plot_of(run)
        kind = kind_of_model(folder) or "a model"
        text = card_of(run, kind, base, is_merged=is_merged, has_plot=plot is not None)
        card = folder / CARD
        if card.is_file() and CARD_MARK.encode() not in card.read_bytes():
            card = folder / OTHER_CARD
            log.info("%s: is not OpenKTO's and stays as it is; the model's card is %s", folder / CARD, card.name)
    except Exception as error:  # the files may have been changed by hand, and hours of training are no reason to fail
        log.warning(
            "warning: %s: the model has no card (%s: %s); it is complete without one.",
            folder,
            type(error).__name__,
            error,
        )
        return
    if plot is not None:
        write_beside_model(folder / PLOT, plot, keeps_old=False)
    write_beside_model(card, f"{text}\n{CARD_MARK}\n".encode(), keeps_old=False)


class CardsOfCopies(Callback):
    """Writes the card of each model that `--save_hf_ckpt` saves beside a checkpoint; for one rank.

    Args:
        of_run: the run's folder.
    """

    def __init__(self, of_run: Path, base: Base) -> None:
        self.of_run, self.base = of_run, base

    def on_save(self, step: int, folder: Path) -> None:
        """Write the card into the copy beside a checkpoint, where there is one."""
        copy = folder.with_name(f"{folder.name}{HF_SUFFIX}")
        if copy.is_dir():
            write_card(copy, self.base, of_run=self.of_run, step=step)
