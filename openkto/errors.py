"""The errors that a user can cause or must act on; each carries the exit status of the process.

Every message has the form "place: rule; got value. Cure."
"""

import importlib.util
from typing import NoReturn

from openkto.masking import masked


class OpenKTOError(Exception):
    """Something that the user can act on; printed as one sentence, a traceback only with --debug.

    The sentence is shown in logs, pages and trackers, so an address in it comes without its key.
    """

    exit_code = 1

    def __init__(self, sentence: str) -> None:
        super().__init__(masked(sentence))


class ConfigError(OpenKTOError):
    """The command line, the configuration file or a model folder named there is wrong."""

    exit_code = 2


class CacheError(ConfigError):
    """The reference's cache cannot be read or written, or its values are not the reference's: it can do without."""


class DataError(OpenKTOError):
    """A data file, or a row in it, is wrong."""

    exit_code = 3


class TrainingError(OpenKTOError):
    """The run cannot continue: a loss that is not finite, the smallest loss scale."""


class StopError(OpenKTOError):
    """The run was asked to stop, by a signal or its time limit, and did; the same command resumes it."""

    exit_code = 75


class NoStepError(StopError):
    """The run was asked to stop before this start made a step: started again the same way, it may never make one."""

    exit_code = 76


class CheckpointError(OpenKTOError):
    """A checkpoint cannot be written, read or resumed."""


def fail(place: str, rule: str, got: str, cure: str) -> NoReturn:
    """Raise a ConfigError in the form that all of them have."""
    raise ConfigError(f"{place}: {rule}; got {got}. {cure}")


def need_package(place: str, package: str, install: str) -> None:
    """Raise a ConfigError that names what to install when the package of an optional feature is missing."""
    if importlib.util.find_spec(package) is None:
        fail(
            place, f"needs the package {package}", "a Python without it", f"Run pip install {install}, or leave it out."
        )
