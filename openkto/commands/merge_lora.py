"""`openkto merge_lora`, `cli/merge_lora.py`: an adapter and its base model as one whole model."""

import logging
import os
from pathlib import Path

from openkto.config.flags import parse
from openkto.errors import ConfigError

log = logging.getLogger(__name__)


def main(argv: list[str]) -> None:
    """Merge as the command line says.

    Raises:
        OpenKTOError: something that the user can act on.
    """
    config, _ = parse(argv, "merge_lora")
    from openkto.commands.card import base_model, write_card
    from openkto.commands.folder import check_has_no_model, make_folder
    from openkto.commands.push import check_push, push_saved
    from openkto.commands.rows import load_tokenizer_of
    from openkto.models.adapter import base_of
    from openkto.models.merging import merge_adapter
    from openkto.report.records import METRICS

    settings, folder = config.model, config.output.save_path
    base = base_of(settings.pretrain)
    if os.path.realpath(folder) in (os.path.realpath(settings.pretrain), os.path.realpath(base)):
        raise ConfigError(
            f"--save_path: must not be the folder of the adapter or its base model; got {folder}. Name another folder."
        )
    check_has_no_model(config)
    tokenizer = load_tokenizer_of(config, settings.pretrain)
    make_folder(Path(folder))
    check_push(config.output, makes=True)
    log.info("%s: adding the adapter to %s", settings.pretrain, base)
    merge_adapter(
        settings.pretrain,
        tokenizer,
        folder,
        settings.export_dtype,
        trust_remote_code=settings.trust_remote_code,
    )
    log.info("the model is in %s", folder)
    if (Path(settings.pretrain) / METRICS).is_file():
        write_card(Path(folder), base_model(base), of_run=Path(settings.pretrain), is_merged=True)
    push_saved(config.output)
