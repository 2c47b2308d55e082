"""TRL's side of `benchmarks/vs_trl.py`: trains as a file of settings says and writes down what it saw.

python -m benchmarks.vs_trl_theirs settings.json
"""

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import KTOConfig, KTOTrainer

from benchmarks.clocks import since_start, time_calls


class Watch(transformers.TrainerCallback):
    """Records when the first step begins, when each of them ends, and the peak of memory until then."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.began = 0.0
        self.ended: list[float] = []
        self.peak_gib: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self.began = self.clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ended.append(self.clock())
        self.peak_gib.append(peak_gib())


def peak_gib() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(settings: dict[str, Any]) -> None:
    """Train, and write what was seen: seconds since the process was started, and memory."""
    clock = since_start(settings)
    imported = clock()
    torch.set_num_threads(settings["threads"])
    base_gib = peak_gib()
    reference = time_calls(KTOTrainer, "_precompute_ref_logps", clock)
    # As the documentation's first example has it, but for the precision, the batch and what a comparison needs: no
    # evaluation, no checkpoints, no trackers.
    config = KTOConfig(
        output_dir=settings["folder"],
        max_length=settings["max_len"],
        num_train_epochs=settings["epochs"],
        max_steps=settings["max_steps"],
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
    watch = Watch(clock)
    trainer = KTOTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[watch],
    )
    trainer.train()
    trainer.save_model(f"{settings['folder']}/model")
    result = {
        "imported": imported,
        "reference": sum(reference),
        "began": watch.began,
        "ended": watch.ended,
        "saved": clock(),
        "base_gib": base_gib,
        "peak_gib": watch.peak_gib,
        "torch": torch.__version__,
    }
    Path(settings["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
