"""`openkto schema`: the JSON schema of the YAML files, for editors."""

import json

from openkto.config.flags import DESCRIPTIONS
from openkto.config.plain_parser import PlainParser
from openkto.config.schema import schema


def main(argv: list[str]) -> None:
    """Print the schema.

    Raises:
        ConfigError: the command line is wrong.
    """
    parser().parse_args(argv)
    print(text())


def text() -> str:
    """Return the schema as it is printed, and as it lies in configs/."""
    return json.dumps(schema(), indent=1)


def parser() -> PlainParser:
    return PlainParser(prog="openkto schema", description=DESCRIPTIONS["schema"])
