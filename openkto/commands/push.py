"""`openkto push FOLDER NAME`, and the upload at the end of a run: a model on the Hugging Face Hub."""

import logging
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from openkto.config.flags import DESCRIPTIONS
from openkto.config.plain_parser import PlainParser
from openkto.errors import ConfigError, OpenKTOError

if TYPE_CHECKING:
    from openkto.config import OutputConfig

log = logging.getLogger(__name__)

SHOWN_PICTURE = re.compile(r"!\[[^\]]*\]\(([\w-]+\.png)\)")


def main(argv: list[str]) -> None:
    """Upload as the command line says.

    Raises:
        OpenKTOError: something that the user can act on.
    """
    options = parser().parse_args(argv)
    folder = Path(options.folder)
    from openkto.models.hub import check_repository, make_repository
    from openkto.models.model_files import kind_of_model, problem_with_model

    if kind_of_model(folder) is None:
        raise ConfigError(
            f"{folder}: must be a folder with a model or an adapter; got none there. Name the --save_path of a run."
        )
    problem = problem_with_model(folder, None)
    if problem is not None:
        raise ConfigError(f"{folder}: must hold a whole model; got one of which {problem}. Save it again.")
    name = check_repository(options.name, "NAME", is_public=options.public)
    make_repository(name, "NAME", is_public=options.public)
    try:
        upload_folder(folder, name)
    except OpenKTOError as error:
        raise OpenKTOError(f"{error} Mend that, and run the same command again; {folder} is as it was.") from error


def parser() -> PlainParser:
    made = PlainParser(prog="openkto push", description=DESCRIPTIONS["push"])
    made.add_argument("folder", metavar="FOLDER", help="the --save_path of a run or of merge_lora")
    made.add_argument("name", metavar="NAME", help="the repository, such as my-name/support")
    made.add_argument("--public", action="store_true", help="let everyone see it; without it a new one is private")
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return made


# ---- of a run --------------------------------------------------------------------------------------------------------


def check_push(output: "OutputConfig", *, makes: bool) -> str | None:
    """See that --push_to_hub will work when the run is at its end; return the repository's whole name.

    Args:
        makes: whether the repository is made where it is not there.

    Raises:
        ConfigError: it would not.
    """
    if output.push_to_hub is None:
        return None
    from openkto.models.hub import check_repository, make_repository

    place = "--push_to_hub"
    name = check_repository(output.push_to_hub, place, is_public=output.hub_public)
    if makes:
        make_repository(name, place, is_public=output.hub_public)
    return name


def push_saved(output: "OutputConfig") -> None:
    """Upload the model that a command has saved, where that was asked for.

    Raises:
        OpenKTOError: it did not succeed; the model is there nevertheless, and it is said how to upload it.
    """
    if output.push_to_hub is None:
        return
    folder, public = Path(output.save_path), ["--public"] if output.hub_public else []
    try:
        name = check_push(output, makes=True)
        assert name is not None, "there is a name"
        upload_folder(folder, name)
    except OpenKTOError as error:
        by_hand = shlex.join(["openkto", "push", str(folder), output.push_to_hub, *public])
        raise OpenKTOError(
            f"{error} Nothing is lost: the model is complete in {folder}. Upload it with `{by_hand}`."
        ) from error


def upload_folder(folder: Path, name: str) -> None:
    """Upload the model of a folder with its card, which then names the repository as the place to load it from.

    Raises:
        OpenKTOError: it did not succeed.
    """
    from openkto.models.hub import upload
    from openkto.models.model_files import CARD
    from openkto.pages.model_card import THIS_FOLDER

    more: dict[str, bytes] = {}
    card = folder / CARD
    if card.is_file():
        text = card.read_text(encoding="utf-8").replace(THIS_FOLDER, name)
        pictures = {folder / shown for shown in SHOWN_PICTURE.findall(text)}
        more = {path.name: path.read_bytes() for path in sorted(pictures) if path.is_file()}
        more[CARD] = text.encode()
    log.info("uploading %s to %s", folder, name)
    log.info("the model is at %s", upload(folder, name, more))
