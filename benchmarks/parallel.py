"""Ranks that share weights or tokens, on the CPU through gloo: how exact the gradient is, and what each rank holds.

    python -m benchmarks.parallel

The first table compares the whole gradient of one step with float64 autograd on one rank (the norm of the difference
over the norm), at each ZeRO stage. The second counts what one rank holds of a model of 24M float32 parameters: its own
weights, and the bytes that the forward keeps for the backward of 512 tokens.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad

from openkto.distributed.strategy import DeepspeedStrategy
from openkto.distributed.tensor_parallel import split_of
from openkto.models import Actor
from tests.ranks import run_ranks
from tests.tiny import Oracle, make_trainer, quiet_args, tiny_llama, token_rows

LABELS = [True, False, True, True, False, False, True]
WAYS = {
    "alone": {},
    "weights shared": {"tensor_parallel_size": 2},
    "tokens shared": {"sequence_parallel_size": 2},
}
LARGER = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 5}
LARGER |= {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 512}


def policy() -> Any:
    """Return the tiny policy."""
    return tiny_llama()


def reference() -> Any:
    """Return another one."""
    return tiny_llama(seed=9)


def gradient(folder: str, more: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train one step; return the whole gradient that the optimizer sees, and the step's rows and pairs."""
    settings = {"batch": 4, "micro": 2, "steps": 1, "beta": 0.3, "model": policy, "reference": reference}
    trainer, strategy = make_trainer(token_rows(LABELS, 3), **settings, **more)
    step, found = strategy.step, {}

    def noting(engine: Any) -> Any:
        for name, parameter in engine.module.named_parameters():
            own = parameter.grad if strategy.zero_stage == 0 else safe_get_full_grad(parameter)
            split = split_of(parameter)
            found[name] = (own if split is None else split.gather(own)).clone()
        return step(engine)

    strategy.step = noting
    trainer.fit(quiet_args(folder, 1, log_batches=True))
    strategy.barrier()
    return found, json.loads(Path(folder, "batches.jsonl").read_text())


def distance(found: dict[str, torch.Tensor], batch: dict[str, Any]) -> float:
    """Return how far the gradient is from that of the definition in float64, relative to it."""
    items = {item["row"]: item for item in token_rows(LABELS, 3).items}
    oracle = Oracle(policy(), beta=0.3, lr=1e-3, max_norm=1e9, reference=reference())
    oracle.step([items[row] for row in batch["rows"]], [items[row] for row in batch["kl_rows"]])
    expected = {name: parameter.grad for name, parameter in oracle.policy.named_parameters()}
    apart = sum((found[f"model.{name}"].double() - value).square().sum() for name, value in expected.items())
    return float((apart / sum(value.square().sum() for value in expected.values())).sqrt())


def held(more: dict[str, Any]) -> tuple[int, int, int]:
    """Return this rank's bytes of weights, and of them those that every rank has, and of what backward needs."""
    strategy = DeepspeedStrategy(zero_stage=0, param_dtype="fp32", **more)
    strategy.setup_distributed()
    actor = Actor(tiny_llama(**LARGER))
    strategy.share_model(actor)
    parameters = list(actor.parameters())
    weights = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(3, 8192, (2, 256), generator=torch.Generator().manual_seed(0))
    scored = torch.ones_like(ids, dtype=torch.bool)
    scored[:, 0] = False
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = actor(ids, torch.ones_like(ids), scored)
    output.log_prob_B.sum().backward()
    everywhere = sum(4 * p.numel() for p in parameters if split_of(p) is None)
    return sum(4 * p.numel() for p in parameters), everywhere, sum(kept.values())


def main() -> None:
    """Print both tables."""
    with tempfile.TemporaryDirectory() as folder:
        print("| | ranks | ZeRO 0 | ZeRO 1 | ZeRO 2 | ZeRO 3 |\n| --- | --- | --- | --- | --- | --- |", flush=True)
        for way, more in WAYS.items():
            for ranks in (1,) if way == "alone" else (2, 4):
                found = []
                for stage in range(4):
                    place = Path(tempfile.mkdtemp(dir=folder))
                    result = run_ranks(gradient, ranks, place, str(place), more | {"zero_stage": stage})[0]
                    found.append(f"{distance(*result):.1e}")
                print(f"| {way} | {ranks} | {' | '.join(found)} |", flush=True)
        print("\n| | weights, MiB a rank | of them on every rank | kept for backward, MiB |\n| --- | --- | --- | --- |")
        for way, more in WAYS.items():
            place = Path(tempfile.mkdtemp(dir=folder))
            ranks = run_ranks(held, 1 if way == "alone" else 2, place, more)
            cells = (f"{max(values) / 2**20:.1f}" for values in zip(*ranks, strict=True))
            print(f"| {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
