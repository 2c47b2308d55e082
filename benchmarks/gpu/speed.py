"""One measurement of `benchmarks/gpu`: a random-weight Llama trains; speed, memory, and where a step's time goes.

    python -m benchmarks.gpu.speed settings.json

The model is made on the device, not loaded, and so is the reference, whose log-probabilities are cached before training
(`ref_mode` cached) or computed in each step (model); a LoRA run takes its adapter off instead (adapter). What the steps
showed is written even where a later one fails.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.limit import matrix_rates
from benchmarks.watch import StepWatch
from openkto.batches.loader import WITHOUT_GRADIENT, KTODataLoader
from openkto.config import LoraConfig
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.models import Actor, load_tokenizer
from openkto.process.stops import StopRequest
from openkto.report.throughput import device_peak_flops
from openkto.trainer import FitArgs, KTOTrainer
from openkto.trainer.planning import plan_for
from openkto.trainer.reference_cache import ReferenceCache
from openkto.trainer.schedule import create_scheduler

# Of a kernel's or an operator's name, in lower case, what tells its kind; the first that matches counts.
KINDS = (
    ("attention", ("flash", "fmha", "attention", "varlen")),
    ("matmul", ("gemm", "nvjet", "cutlass", "xmma", "aten::mm", "aten::addmm", "aten::bmm", "aten::linear")),
    ("optimizer", ("adam", "multi_tensor", "foreach")),
    ("copies", ("memcpy", "memset", "copy", "catarray", "aten::cat", "fill")),
    ("communication", ("nccl", "gloo", "c10d")),
)


def main(settings: dict[str, Any]) -> None:
    """Train, profile one step more where asked, and write what was seen."""
    trainer, strategy = make_trainer(settings)
    steps = settings["steps"] + 1
    summary: dict[str, float] = {}
    on_gpu = strategy.device.type == "cuda"
    watch = StepWatch({steps + 1: profiled(summary, on_gpu)} if settings["profile"] else {}, with_parts=False)
    args = FitArgs(save_path=f"{settings['folder']}/out", max_steps=steps + 1, eval_steps=0, save_steps=0,
                   use_tensorboard="none")  # fmt: skip
    dtype = torch.bfloat16 if settings["precision"] == "bf16" else torch.float32
    rates = matrix_rates(settings["shape"], dtype, strategy.device.type)
    try:
        trainer.fit(args)
    finally:
        result = {
            "steps": watch.steps[1:steps],  # one to warm up before, one that is profiled behind
            "peak_flops": device_peak_flops(strategy.device),
            "matrix_rates": rates,
            "profile": summary,
            "attention": trainer.model.module.language_model.config._attn_implementation,
        }
        Path(settings["result"]).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


def make_actor(settings: dict[str, Any], strategy: DeepspeedStrategy, lora: int) -> Actor:
    """Return a random-weight model on the strategy's device, the same one at each call."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(strategy.load_dtype)
    try:
        with torch.device(strategy.device):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings["shape"]))
    finally:
        torch.set_default_dtype(before)
    if settings["write_model"] and not lora:
        model.save_pretrained(settings["write_model"])
    return Actor(
        model, gradient_checkpointing=settings["gradient_checkpointing"], share_prompts=settings["share_prompts"],
        lora=LoraConfig(lora_rank=lora),
    )  # fmt: skip


def make_trainer(settings: dict[str, Any]) -> tuple[KTOTrainer, DeepspeedStrategy]:
    """Return the trainer of the settings, ready to fit, and its strategy."""
    strategy = DeepspeedStrategy(zero_stage=settings["zero_stage"], param_dtype=settings["precision"])
    strategy.setup_distributed()
    tokenizer = load_tokenizer(settings["model"])
    rows = UnpairedPreferenceDataset(
        settings["rows"], tokenizer, settings["max_len"], cache_dir=f"{settings['folder']}/cache"
    )
    loader = KTODataLoader(
        rows, settings["batch"], max_tokens_per_micro_batch=settings["micro_tokens"], packed=True,
        larger_without_gradient=WITHOUT_GRADIENT[strategy.device.type], pin_memory=strategy.device.type == "cuda",
    )  # fmt: skip
    total = settings["steps"] + 2
    reference: Any = None
    beside = None
    if settings["ref_mode"] == "cached":
        cache = ReferenceCache(Path(settings["folder"]) / "reference", {}, strategy, [loader], total)
        cache.look_up()
        passing = make_actor(settings | {"write_model": ""}, strategy, 0)
        with strategy.passing_model(passing) as frozen:
            plan_for([loader], passing)
            cache.fill(frozen, lambda: None, StopRequest())
        reference = cache.reference()
    elif settings["ref_mode"] == "model":
        beside = make_actor(settings | {"write_model": ""}, strategy, 0)
    actor = make_actor(settings, strategy, settings["lora"])
    optimizer = strategy.create_optimizer(actor, lr=1e-6)
    scheduler = create_scheduler(optimizer, "constant", total_steps=total, warmup_ratio=0.0)
    (engine, optimizer, scheduler), frozen = strategy.prepare((actor, optimizer, scheduler), beside)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer = KTOTrainer(
        model=engine, ref_model=reference or frozen, tokenizer=tokenizer, strategy=strategy, optim=optimizer,
        train_dataloader=loader, scheduler=scheduler, max_epochs=1000, disable_ds_ckpt=True,
    )  # fmt: skip
    return trainer, strategy


@contextmanager
def profiled(summary: dict[str, float], on_gpu: bool) -> Iterator[None]:
    """Run what is inside under torch's profiler, and fill in the shares of its time."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        started = time.perf_counter()
        yield
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    summary.update(shares(profiler, seconds, on_gpu))


def shares(profiler: Any, seconds: float, on_gpu: bool) -> dict[str, float]:
    """Return the share of a step that each kind of kernel takes, the head apart, and in which nothing runs."""
    spent: Counter[str] = Counter()
    for event in profiler.key_averages():
        if on_gpu and event.device_type != DeviceType.CUDA:
            continue
        name = event.key.lower()
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kind = next((kind for kind, marks in KINDS if any(mark in name for mark in marks)), "the rest")
        spent[kind] += own / 1e6
    head = sum(
        (event.device_time_total if on_gpu else event.cpu_time_total) / 1e6
        for event in profiler.key_averages()
        if event.key in ("_LinearLogProbs", "_LinearLogProbsBackward")
    )
    result = {kind: value / seconds for kind, value in spent.items()}
    result["idle"] = max(0.0, 1 - sum(spent.values()) / seconds)
    # Its products are among the matmuls already.
    return dict(sorted(result.items(), key=lambda item: -item[1])) | {"of all these, the head": head / seconds}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
