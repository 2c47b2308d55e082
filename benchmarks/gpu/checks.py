"""The checks of `benchmarks/gpu`: is what runs fast here also right? One process, a line a check.

    python -m benchmarks.gpu.checks settings.json

On a GPU bfloat16 is compared with float32; without one, float32 with float64. Bounds are those of the coarser dtype.
"""

import copy
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from benchmarks.material import read_rows
from openkto.batches.micro_batch import REST, Sequence, after_prompts, collate
from openkto.commands import train
from openkto.models import Actor
from openkto.models.kept_keys import KeptKeys
from openkto.trainer.forwards import forward, model_inputs, to_device

LENGTHS = (5, 64, 33, 127, 18)
# Nats a token, and the relative error of a gradient: what the coarser dtype's round-off makes, with room.
BOUNDS = {torch.bfloat16: (0.05, 0.1), torch.float32: (1e-4, 1e-4)}
STEPS, HALF = 4, 2
# Where prompts are shared: their tokens, completions to each, and tokens of a completion.
PROMPTS, ANSWERS, ANSWER = (100, 37), 3, 24


def main(settings: dict[str, Any]) -> None:
    """Run all checks and write their results, each when it is there: name, value, bound, whether it holds."""
    results: list[tuple[str, float, float, bool]] = []

    def check(name: str, value: float, bound: float) -> None:
        results.append((name, value, bound, value <= bound))
        Path(settings["result"]).write_text(json.dumps(results), encoding="utf-8")
        print(f"{'ok    ' if value <= bound else 'FAILED'} {name}: {value:.2e}, at most {bound:.0e}", flush=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    coarse, fine = (torch.bfloat16, torch.float32) if device == "cuda" else (torch.float32, torch.float64)
    parts: dict[str, Callable[[], None]] = {
        "the model": lambda: check_model(settings["shape"], device, coarse, fine, check),
        "ZeRO": lambda: check_stages(settings, check),
        "LoRA": lambda: check_lora(settings, check),
        "resuming": lambda: check_resuming(settings, check),
    }
    for name, part in parts.items():
        try:
            part()
        except Exception:
            # One that fails is a finding; the others are still to be seen.
            traceback.print_exc()
            check(f"{name}: ended with an error, which the log shows", math.nan, 0)
    sys.stdout.flush()
    os._exit(int(any(math.isnan(value) for _, value, _, _ in results)))


def check_model(shape: dict[str, Any], device: str, coarse: torch.dtype, fine: torch.dtype, check: Any) -> None:
    """Compare dtypes, and packed with padded rows, on one model: token log-probabilities and gradients."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).to(device)
    exact = scores(Actor(copy.deepcopy(model).to(fine), packing="off"), device)
    padded = scores(Actor(copy.deepcopy(model).to(coarse), packing="off"), device)
    actor = Actor(copy.deepcopy(model).to(coarse), packing="on")
    print(f"attention: packed {actor.language_model.config._attn_implementation}", flush=True)
    packed = scores(actor, device)
    nats, gradient = BOUNDS[coarse]
    names = f"{coarse} against {fine}".replace("torch.", "")
    for name, found, known in (
        (f"padded, {names}", padded, exact),
        (f"packed, {names}", packed, exact),
        ("packed against padded", packed, padded),
    ):
        check(f"{name}: log-probabilities, mean nats a token", float((found[0] - known[0]).abs().mean()), nats)
        apart = torch.cat([(a - b).flatten() for a, b in zip(found[1], known[1], strict=True)]).norm()
        whole = torch.cat([b.flatten() for b in known[1]]).norm()
        check(f"{name}: gradient, relative", float(apart / whole), gradient)
    alone, shared = (completions(actor, device, shares=shares) for shares in (False, True))
    check("prompts shared against each its own: nats a token", float((alone - shared).abs().max()) / ANSWER, nats)
    after = completions_after_prompts(actor, device)
    check("prompts that another forward has run: nats a token", float((alone - after).abs().max()) / ANSWER, nats)


def completions(actor: Actor, device: str, *, shares: bool) -> Tensor:
    """Return the log-probabilities of several completions to each of two prompts, in float64 on the CPU."""
    sequences, rows = drawn_completions(actor)
    reused_B = np.array([0 if i % ANSWERS == 0 or not shares else len(s[0]) for i, s in enumerate(sequences)])
    with torch.no_grad():
        return forward(actor, collate(sequences, rows, 0, reused_B), torch.device(device)).double().cpu()


def completions_after_prompts(actor: Actor, device: str) -> Tensor:
    """Return the same, run after a forward of the prompts, each with the completion of the row before."""
    sequences, rows = drawn_completions(actor)
    others = [(prompt, *sequences[i - 1][1:]) for i, (prompt, _, _) in enumerate(sequences)]
    before, after = collate(others, rows, 0), collate(sequences, rows, 0)
    after |= after_prompts(after, before, np.array([len(prompt) - 1 for prompt, _, _ in sequences]))
    after |= {name: after[own] for name, own in REST.items()}
    kept, place = KeptKeys(), torch.device(device)
    with torch.no_grad():
        actor(*model_inputs(to_device(before, place)), kept_keys=kept)
        kept.start_taking()
        return actor(*model_inputs(to_device(after, place)), kept_keys=kept).log_prob_B.double().cpu()


def drawn_completions(actor: Actor) -> tuple[list[Sequence], list[dict[str, Any]]]:
    """Return two prompts with several completions each, and their rows."""
    generator = torch.Generator().manual_seed(2)
    vocabulary = actor.model.config.vocab_size

    def draw(count: int) -> list[int]:
        return torch.randint(3, vocabulary, (count,), generator=generator).tolist()

    drawn = [draw(length) for length in PROMPTS]
    sequences = [(prompt, draw(ANSWER), [True] * ANSWER) for prompt in drawn for _ in range(ANSWERS)]
    return sequences, [{"label": True, "weight": 1.0, "row": i} for i in range(len(sequences))]


def scores(actor: Actor, device: str) -> tuple[Tensor, list[Tensor]]:
    """Return the log-probabilities of fixed rows' tokens and the gradients of their mean, in float64 on the CPU."""
    generator = torch.Generator().manual_seed(1)
    vocabulary, rows, longest = actor.model.config.vocab_size, len(LENGTHS), max(LENGTHS)
    ids_BT = torch.randint(3, vocabulary, (rows, longest), generator=generator)
    mask_BT = torch.arange(longest)[None] < torch.tensor(LENGTHS)[:, None]
    scored_BT = mask_BT.clone()
    scored_BT[:, :3] = False
    indices = (mask.flatten().nonzero()[:, 0].to(device) for mask in (mask_BT, scored_BT))
    inputs = (ids_BT.to(device), mask_BT.long().to(device), scored_BT.to(device), *indices)
    log_prob_K = actor(*inputs, with_tokens=True).log_prob_K
    log_prob_K.mean().backward()
    gradients = [p.grad.double().cpu() for p in actor.parameters() if p.grad is not None]
    return log_prob_K.detach().double().cpu(), gradients


def bound_of_losses(settings: dict[str, Any]) -> float:
    return BOUNDS[torch.bfloat16 if settings["precision"] == "bf16" else torch.float32][1]


def check_stages(settings: dict[str, Any], check: Any) -> None:
    """Compare whole runs at ZeRO 1 to 3."""
    whole = losses(settings, "zero1", ["--zero_stage", "1"])
    check("a run: losses that are not finite", sum(loss != loss for loss in whole), 0)
    for stage in (2, 3):
        other = losses(settings, f"zero{stage}", ["--zero_stage", str(stage)])
        check(f"ZeRO {stage} against 1: loss of {STEPS} steps", farthest(other, whole), bound_of_losses(settings))


def check_lora(settings: dict[str, Any], check: Any) -> None:
    """Look at LoRA's first rewards: the adapter changes nothing yet."""
    # With shared prompts the reference's round-off is another one in float32.
    losses(settings, "lora", ["--zero_stage", "1", "--lora_rank", "8", "--share_prompts", "off"])
    first = train_lines(settings, "lora")[0]
    rewards = max(abs(first[name]) for name in ("rewards/chosen", "rewards/rejected") if name in first)
    check("LoRA, the adapter off as the reference: the first step's rewards", rewards, 0)


def check_resuming(settings: dict[str, Any], check: Any) -> None:
    """Compare a run that was stopped and resumed with one that was not."""
    whole = losses(settings, "whole", ["--zero_stage", "1"])
    losses(settings, "resumed", ["--zero_stage", "1", "--stop_after_steps", str(HALF)])
    resumed = losses(settings, "resumed", ["--zero_stage", "1", "--load_checkpoint"])
    bound = bound_of_losses(settings)
    check("checkpoint and resume: loss against the run that was not stopped", farthest(resumed, whole), bound)


def losses(settings: dict[str, Any], name: str, flags: list[str]) -> list[float]:
    """Train the model of the settings and return each step's loss."""
    folder = Path(settings["folder"])
    train.main(
        [
            "--pretrain", settings["model"], "--dataset", settings["rows"], "--save_path", f"{folder}/{name}",
            "--param_dtype", settings["precision"], "--train_batch_size", "16", "--micro_train_batch_size", "4",
            "--max_len", "256", "--max_steps", str(STEPS), "--learning_rate", "1e-4", "--lr_warmup_ratio", "0",
            "--lr_scheduler", "constant", "--use_tensorboard", "none", "--eval_steps", "0",
            "--data_cache_dir", f"{folder}/cache", *flags,
        ]
    )  # fmt: skip
    return [line["loss"] for line in train_lines(settings, name)]


def train_lines(settings: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the training lines of a run's records."""
    return [line for line in read_rows(Path(settings["folder"]) / name / "metrics.jsonl") if line["kind"] == "train"]


def farthest(found: list[float], known: list[float]) -> float:
    """Return the largest difference of two runs' losses; infinite where they are not equally long."""
    if len(found) != len(known):
        return float("inf")
    return max(abs(a - b) for a, b in zip(found, known, strict=True))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
