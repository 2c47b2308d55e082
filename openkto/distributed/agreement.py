"""Run a function on some ranks; every rank gets its result or its error. Check that all ranks agree on a value."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from openkto.errors import (
    CacheError,
    CheckpointError,
    ConfigError,
    DataError,
    NoStepError,
    OpenKTOError,
    StopError,
    TrainingError,
)
from openkto.masking import masked
from openkto.process.limits import is_panic

T = TypeVar("T")

# The classes by which an error goes to other ranks: one of its own may not survive the way.
KINDS: tuple[type[OpenKTOError], ...] = (
    *(CacheError, ConfigError, DataError, TrainingError, CheckpointError, NoStepError, StopError),
    OpenKTOError,
)
DIFFERENCES_NAMED = 4
LONGEST_VALUE = 60  # characters


class Ranks(Protocol):
    """What an agreement asks of a strategy."""

    rank: int
    world_size: int

    def gather_objects(self, value: Any) -> list[Any]: ...


def on_some_ranks(strategy: Ranks, do: Callable[[], T], *, is_mine: bool) -> T | None:
    """Run a function on some ranks; return its result where it ran, else None. Every rank gets its error.

    Raises:
        OpenKTOError: on every rank, where it was raised on any; of the same kind. What else was raised on a rank
            is raised there, and is an OpenKTOError on the others, which would wait for that rank forever.
    """
    given: T | None = None
    failure: tuple[type[OpenKTOError], str] | None = None
    own: BaseException | None = None
    if is_mine:
        try:
            given = do()
        except OpenKTOError as error:
            failure = (next(kind for kind in KINDS if isinstance(error, kind)), str(error))
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            own, failure = error, (OpenKTOError, f"rank {strategy.rank} failed with {type(error).__name__}: {error}")
    found = next((found for found in strategy.gather_objects(failure) if found is not None), None)
    if own is not None:
        raise own
    if found is not None:
        raise found[0](found[1])
    return given


def check_all_agree(strategy: Ranks, own: Mapping[str, Any]) -> None:
    """Compare what must be the same on every rank, keyed by its name in the error message; all ranks must call it.

    The ranks need not even have the same names, so this may stand before everything that a difference would break.

    Args:
        own: plain values, which pickle and compare.

    Raises:
        ConfigError: on every rank, naming the first rank that differs from rank 0, and in what.
    """
    first, *others = strategy.gather_objects(dict(own))
    apart = {rank: names for rank, other in enumerate(others, 1) if (names := _differing(first, other))}
    if not apart:
        return
    rank, names = next(iter(apart.items()))
    differences = [
        f"{name}: rank 0 {_shown(first.get(name))}, rank {rank} {_shown(others[rank - 1].get(name))}"
        for name in names[:DIFFERENCES_NAMED]
    ]
    if len(names) > DIFFERENCES_NAMED:
        differences.append(f"and {len(names) - DIFFERENCES_NAMED} more")
    more = f" ({len(apart)} of {strategy.world_size} ranks differ from rank 0)" if len(apart) > 1 else ""
    raise ConfigError(
        f"all ranks: must train the same run; got {'; '.join(differences)}{more}. Start every rank with the same "
        "command, files and versions."
    )


def _differing(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in {**first, **other} if first.get(name) != other.get(name)]


def _shown(value: Any) -> str:
    text = "not set" if value is None else masked(str(value))
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def reason_of(do: Callable[[], object]) -> str | None:
    """Do something that may fail for a reason to tell; return the reason, or None where it went well."""
    try:
        do()
    except OSError as error:
        return f"{error.strerror or error}"
    except OpenKTOError as error:
        return str(error)
    return None


def first_problem(strategy: Ranks, problem: str | None) -> str | None:
    """Return the first rank's problem to every rank, or None where there is none; all ranks must call it."""
    return next((found for found in strategy.gather_objects(problem) if found is not None), None)
