"""Settings of all tests: one thread a process, since tiny models gain nothing from more and lose much on busy cores."""

import logging
import os

import hypothesis
import pytest

# A busy machine makes single examples slow; pytest's own limit is what ends a test that hangs.
hypothesis.settings.register_profile("openkto", deadline=None)
hypothesis.settings.load_profile("openkto")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def same_log_level():
    """A command that a test runs here sets how much is logged; the next test starts as this one did."""
    logger = logging.getLogger("openkto")
    level = logger.level
    yield
    logger.setLevel(level)
