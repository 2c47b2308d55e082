"""The numbers of a known run do not move unless somebody means them to."""

import json

import pytest

from tests.golden import FILE, run


@pytest.mark.parametrize("share_prompts", ["off", "on"])
def test_twenty_steps_give_the_committed_numbers(share_prompts, tmp_path):
    expected = json.loads(FILE.read_text())["steps"]
    steps = run(tmp_path, share_prompts)["steps"]
    assert len(steps) == len(expected) == 20
    for number, (step, golden) in enumerate(zip(steps, expected, strict=True), start=1):
        assert step == pytest.approx(golden, rel=1e-4, abs=1e-4), f"step {number}"
