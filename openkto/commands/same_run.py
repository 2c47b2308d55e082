"""What the ranks of a command compare before they compute anything together: settings, versions, rows, model files.

Ranks that disagree train a wrong run, or wait for each other forever. So each comparison stands before whatever a
difference would break.
"""

import os
import socket
from typing import Any

from openkto.commands.build import Models
from openkto.config import RunConfig, eval_sets, option_of, policy_name, reference_name, to_flat, trains_adapter
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.distributed.agreement import check_all_agree, on_some_ranks
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.models.adapter import base_of
from openkto.models.fingerprint import fetch, model_fingerprint
from openkto.report.environment import versions
from openkto.trainer.identity import in_words


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return what must be equal on all ranks and is known before they meet, keyed by its name in the error message."""
    settings = {f"--{name}": value for name, value in to_flat(config).items() if not option_of(name).may_differ}
    settings["the names in --eval_dataset"] = list(eval_sets(config.data))
    settings["an adapter trains"] = trains_adapter(config)
    settings["--ref_pretrain is the policy's"] = reference_name(config.model) == policy_name(config.model)
    return settings | {f"the version of {package}": version for package, version in versions().items()}


def check_same_rows(
    strategy: DeepspeedStrategy, rows: UnpairedPreferenceDataset | None, eval_rows: dict[str, UnpairedPreferenceDataset]
) -> None:
    """Compare what the ranks have read; all ranks must call it.

    Raises:
        ConfigError: on every rank, naming one with other rows than rank 0.
    """
    own = {} if rows is None else {"the training rows (fingerprint)": rows.fingerprint()}
    own |= {f"the evaluation rows {name} (fingerprint)": found.fingerprint() for name, found in eval_rows.items()}
    check_all_agree(strategy, own)


def fetch_models(strategy: DeepspeedStrategy, models: Models) -> None:
    """Bring models with Hub names into the local cache, once a node, so that all ranks load the same files.

    Raises:
        ConfigError: on every rank, where one cannot be fetched.
    """
    on_some_ranks(strategy, lambda: fetch(_parts(models)), is_mine=strategy.local_rank == 0)


def prints_of_models(strategy: DeepspeedStrategy, models: Models, *, is_needed: bool = True) -> dict[str, str]:
    """Return each model's and each adapter's base's fingerprint, compared over all ranks, which must call it.

    What several ranks of a node have under one name is read by the first of them.

    Args:
        is_needed: False reads nothing where one rank would read for all, and there is nothing to compare.

    Raises:
        ConfigError: on every rank, naming one with other files than rank 0, or what cannot be read.
    """
    places = {name: os.path.realpath(name) if os.path.isdir(name) else name for name in _parts(models)}
    readers = _readers(strategy.gather_objects((strategy.local_rank == 0, socket.gethostname(), places)))
    if not is_needed and set(readers.values()) == {0}:
        return {}
    mine = [name for name in places if readers[strategy.rank, name] == strategy.rank]
    read = on_some_ranks(strategy, lambda: {places[name]: model_fingerprint(name) for name in mine}, is_mine=True)
    known = strategy.gather_objects(read)
    prints = {name: known[readers[strategy.rank, name]][place] for name, place in places.items()}
    check_all_agree(strategy, {in_words(name): files for name, files in describe_models(models, prints).items()})
    return prints


def describe_models(models: Models, prints: dict[str, str]) -> dict[str, str]:
    """Return what says which files policy and reference are of: an adapter's with its base's."""
    return {
        f"{role}_files": " on ".join(prints[part] for part in dict.fromkeys((name, base_of(name))))
        for role, name in zip(("policy", "reference"), models, strict=True)
    }


def _parts(models: Models) -> list[str]:
    return list(dict.fromkeys(part for name in models for part in (name, base_of(name))))


def _readers(ranks: list[tuple[bool, str, dict[str, str]]]) -> dict[tuple[int, str], int]:
    """Return which rank reads the model of a name on a rank: the first of its node that has it.

    Args:
        ranks: of each, whether it is its node's first, the node, and where the model of each name lies.
    """
    readers: dict[tuple[int, str], int] = {}
    first_with: dict[tuple[str, str], int] = {}
    for rank, (is_first, node, places) in enumerate(ranks):
        for name, place in places.items():
            if is_first:  # it reads in any case: two nodes may have one name
                first_with[node, place] = rank
            readers[rank, name] = first_with.setdefault((node, place), rank)
    return readers
