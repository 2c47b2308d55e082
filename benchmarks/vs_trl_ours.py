"""OpenKTO's side of `benchmarks/vs_trl.py`: trains as a file of settings says and writes down what it saw.

python -m benchmarks.vs_trl_ours settings.json
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.clocks import since_start, time_calls
from benchmarks.watch import StepWatch
from openkto.commands import train
from openkto.report.throughput import peak_memory_gib
from openkto.trainer.reference_cache import ReferenceCache


def main(settings: dict[str, Any]) -> None:
    """Train, and write what was seen: seconds since the process was started, and memory."""
    clock = since_start(settings)
    imported = clock()
    torch.set_num_threads(settings["threads"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base_gib = peak_memory_gib(device)
    reference = time_calls(ReferenceCache, "fill", clock)
    watch = StepWatch(with_parts=False, clock=clock)
    train.main(settings["flags"])
    result = {
        "imported": imported,
        "reference": sum(reference),
        "began": watch.steps[0]["ended"] - watch.steps[0]["seconds"],
        "ended": [step["ended"] for step in watch.steps],
        "saved": clock(),
        "base_gib": base_gib,
        "peak_gib": [step["peak_gib"] for step in watch.steps],
        "torch": torch.__version__,
    }
    Path(settings["result"]).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # gloo may abort an exit that has nothing left to do


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
