"""Settings of all tests: one thread a process, since tiny models gain nothing from more and lose much on busy cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
