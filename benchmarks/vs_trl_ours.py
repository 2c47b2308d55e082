"""OpenKTO's side of `benchmarks/vs_trl.py`: trains as a file of settings says and writes down what it saw.

python -m benchmarks.vs_trl_ours settings.json
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.counting import FlopCount
from benchmarks.material import CLOCKS
from benchmarks.watch import StepWatch
from openkto.commands import train
from openkto.report.throughput import peak_memory_gib


def main(settings: dict[str, Any]) -> None:
    """Train, and write what was seen beside the settings."""
    torch.set_num_threads(settings["threads"])
    base_gib = peak_memory_gib(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    flops = FlopCount()
    watch = StepWatch({settings["steps"]: flops}, with_parts=False, clock=CLOCKS[settings["clock"]])
    train.main(settings["flags"])
    result = {
        "began": watch.began,
        "seconds": [step["seconds"] for step in watch.steps],
        "peak_gib": [step["peak_gib"] for step in watch.steps],
        "base_gib": base_gib,
        "processor_seconds": watch.processor_seconds,
        "computed_flops": flops.total,
        "useful_flops": [step["useful_flops"] for step in watch.steps],
        "rows": [step["rows"] for step in watch.steps],
        "tokens": [step["tokens"] for step in watch.steps],
    }
    Path(settings["result"]).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # gloo may abort an exit that has nothing left to do


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
