"""A run held to the definition: each step again in float64, a row at a time, from the rows and pairs it wrote down."""

from pathlib import Path

import pytest

from tests.helpers.records import assert_close, batches
from tests.helpers.runs import Trained
from tests.tiny import Oracle, OracleStep, TokenRowList


def replay(folder: Path, rows: TokenRowList, oracle: Oracle) -> list[OracleStep]:
    """Train the oracle on the rows and pairs of each step."""
    items = {item["row"]: item for item in rows.items}
    return [oracle.step([items[r] for r in b["rows"]], [items[r] for r in b["kl_rows"]]) for b in batches(folder)]


def assert_is_definition(
    folder: Path, run: Trained, rows: TokenRowList, oracle: Oracle, *, kl: float = 1e-5, weights: float = 1e-5
) -> list[OracleStep]:
    """Compare each step's values, and the weights that train, with the oracle's; return the oracle's steps.

    Args:
        kl, weights: the largest difference of z_ref and of a weight; the other bounds are relative.
    """
    lines, got = run
    steps = replay(folder, rows, oracle)
    for line, step in zip(lines, steps, strict=True):
        assert line["loss"] == pytest.approx(step.loss, rel=1e-5)
        assert line["grad_norm"] == pytest.approx(step.grad_norm, rel=1e-4)
        if "kl" in line:
            assert line["kl"] == pytest.approx(step.z_ref, rel=1e-4, abs=kl)
    named = oracle.policy.named_parameters(remove_duplicate=False)
    trained = {name: parameter.detach() for name, parameter in named if parameter.requires_grad}
    assert trained.keys() <= got.keys()
    assert_close(trained, {name: got[name] for name in trained}, weights)
    return steps
