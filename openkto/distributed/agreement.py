"""What some ranks do alone, and all know the outcome of."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from openkto.errors import CheckpointError, ConfigError, DataError, OpenKTOError, TrainingError

T = TypeVar("T")

# The classes by which an error goes to other ranks: one of its own may not survive the way.
KINDS: tuple[type[OpenKTOError], ...] = (ConfigError, DataError, TrainingError, CheckpointError, OpenKTOError)


class Ranks(Protocol):
    """What an agreement asks of a strategy."""

    rank: int
    world_size: int

    def gather_objects(self, value: Any) -> list[Any]: ...


def on_some_ranks(strategy: Ranks, do: Callable[[], T], *, is_mine: bool) -> T | None:
    """Do something on some ranks alone, and let every rank know how it went; return what it gave here.

    Raises:
        OpenKTOError: on every rank, where it was raised on any; of the same kind.
    """
    given: T | None = None
    failure: tuple[type[OpenKTOError], str] | None = None
    if is_mine:
        try:
            given = do()
        except OpenKTOError as error:
            failure = (next(kind for kind in KINDS if isinstance(error, kind)), str(error))
    for found in strategy.gather_objects(failure):
        if found is not None:
            raise found[0](found[1])
    return given
