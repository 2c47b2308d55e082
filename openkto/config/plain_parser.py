"""The parser of a command whose flags are not settings of a run: its errors are ConfigErrors."""

import argparse
from typing import NoReturn

from openkto.errors import ConfigError


class PlainParser(argparse.ArgumentParser):
    """An argparse parser that raises where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: must be as {self.prog} --help says; got this: {message}. Correct it.")
