"""`openkto completion bash|zsh`: what the shell needs to complete the command line."""

import argparse

from openkto.commands import push, report, schema
from openkto.config import completion
from openkto.config.flags import DESCRIPTIONS, REQUIRED, parser_of
from openkto.config.plain_parser import PlainParser

SHELLS = {"bash": completion.bash, "zsh": completion.zsh}


def main(argv: list[str]) -> None:
    """Print the script.

    Raises:
        ConfigError: the command line is wrong.
    """
    print(SHELLS[parser().parse_args(argv).shell](parsers()), end="")


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return every command's parser, in the order of `openkto --help`."""
    own = {"report": report.parser, "push": push.parser, "schema": schema.parser, "completion": parser}
    of_runs: dict[str, argparse.ArgumentParser] = {command: parser_of(command) for command in REQUIRED}
    return {name: of_runs[name] if name in of_runs else own[name]() for name in DESCRIPTIONS}


def parser() -> PlainParser:
    made = PlainParser(prog="openkto completion", description=DESCRIPTIONS["completion"])
    made.add_argument("shell", choices=tuple(SHELLS), help="your shell")
    return made
