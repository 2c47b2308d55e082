"""TRL's side of `benchmarks/vs_trl.py`: trains as a file of settings says and writes down what it saw.

python -m benchmarks.vs_trl_theirs settings.json
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import KTOConfig, KTOTrainer

from benchmarks.counting import FlopCount
from benchmarks.material import CLOCKS


class Watch(transformers.TrainerCallback):
    """Records the seconds from the end of a step to that of the next, and counts the FLOPs of the last one."""

    def __init__(self, counted_step: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.counted_step = counted_step
        self.began = self.last = 0.0
        self.seconds: list[float] = []
        self.peak_gib: list[float] = []
        self.flops = FlopCount()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self.began, self.last = time.time(), self.clock()
        if state.global_step + 1 == self.counted_step:
            self.flops.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.counted_step:
            self.flops.__exit__()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = self.clock()
        self.seconds.append(now - self.last)
        self.peak_gib.append(peak_gib())
        self.last = now


def peak_gib() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(settings: dict[str, Any]) -> None:
    """Train, and write what was seen beside the settings."""
    torch.set_num_threads(settings["threads"])
    base_gib = peak_gib()
    # As the documentation's first example has it, but for the precision, the batch and what a comparison needs: no
    # evaluation, no checkpoints, no trackers.
    config = KTOConfig(
        output_dir=settings["folder"],
        max_length=settings["max_len"],
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["per_device"],
        gradient_accumulation_steps=settings["batch"] // settings["per_device"],
        bf16=settings["dtype"] == "bf16",
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings["more"],
    )
    # float32 weights, as TRL loads them by itself; with bf16 it computes under autocast.
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    rows = [json.loads(line) for line in Path(settings["rows"]).read_text(encoding="utf-8").splitlines()]
    watch = Watch(settings["steps"], CLOCKS[settings["clock"]])
    trainer = KTOTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[watch],
    )
    trainer.train()
    result = {
        "began": watch.began,
        "seconds": watch.seconds,
        "peak_gib": watch.peak_gib,
        "base_gib": base_gib,
        "computed_flops": watch.flops.total,
        "versions": f"trl {settings['version']}, transformers {transformers.__version__}, torch {torch.__version__}",
    }
    Path(settings["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
