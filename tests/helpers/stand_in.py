"""A strategy without DeepSpeed and without other ranks, and a trainer on it: what the loop does, in this process.

It serves tests of when the loop does what: when it logs, evaluates, saves and ends, and what is in a line. What a step
computes is tested on `DeepspeedStrategy`.
"""

import contextlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from openkto.batches.loader import KTODataLoader
from openkto.config import LOSSES
from openkto.distributed.engine_files import RecordingCheckpointEngine
from openkto.distributed.update import StepResult
from openkto.distributed.zero_options import ZeroOptions
from openkto.models import Actor
from openkto.process.stops import StopRequest
from openkto.trainer import KTOTrainer, Services
from openkto.trainer.schedule import create_scheduler
from tests.tiny import TokenRowList, quiet_args, tiny_llama, token_rows

FILE = "engine_states.pt"  # a name that a manifest may have


class Engine(nn.Module):
    """A model with its optimizer."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.module, self.optimizer = module, optimizer

    def forward(self, *inputs: Any, **more: Any) -> Any:
        return self.module(*inputs, **more)


class StandIn:
    """A `TrainingStrategy` of plain torch, on one rank."""

    rank = data_rank = random_rank = zero_stage = 0
    world_size = data_size = 1
    precision = "fp32"
    device = torch.device("cpu")
    zero = ZeroOptions()

    def __init__(self, max_norm: float = 1.0) -> None:
        self.max_norm = max_norm

    def reference_forward(self, ref_model: Any) -> contextlib.AbstractContextManager[None]:
        return torch.no_grad()

    def weights_for_generation(self, engine: Engine) -> contextlib.AbstractContextManager[None]:
        return torch.no_grad()

    def all_reduce(self, values: list[float] | Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        return torch.as_tensor(values, dtype=torch.float64)

    def gather_rows(self, values_LC: Tensor, lines: list[int] | None = None) -> np.ndarray:
        return values_LC.double().numpy()

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def set_learning_rates(self, engine: Engine, rates: list[float]) -> None:
        for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def backward(self, engine: Engine, loss: Tensor, *, is_last: bool) -> None:
        loss.backward()

    def step(self, engine: Engine) -> StepResult:
        norm = torch.nn.utils.clip_grad_norm_(engine.parameters(), self.max_norm)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        return StepResult(float(norm), True)

    def loss_scale(self, engine: Engine) -> dict[str, float]:
        return {}

    def restore_loss_scale(self, engine: Engine, saved: dict[str, float]) -> None:
        assert not saved

    def save_engine(self, engine: Engine, folder: Path, files: RecordingCheckpointEngine) -> None:
        files.save({"model": engine.state_dict(), "optimizer": engine.optimizer.state_dict()}, str(folder / FILE))

    def load_engine(self, engine: Engine, folder: Path, updates: int) -> None:
        saved = torch.load(folder / FILE)
        engine.load_state_dict(saved["model"])
        engine.optimizer.load_state_dict(saved["optimizer"])
        counts = {int(state["step"]) for state in saved["optimizer"]["state"].values()}
        assert counts <= {updates}


STEPS = 6  # of `prepared`


def plain_trainer(
    rows: TokenRowList, *, batch: int = 8, micro: int = 8, lr: float = 1e-3, steps: int = 3, beta: float = 0.1,
    l2: float = 0.0, seed: int = 1, schedule: str = "constant", warmup_ratio: float = 0.0,
    eval_rows: TokenRowList | None = None, reference: nn.Module | None = None, **more: Any,
) -> KTOTrainer:  # fmt: skip
    """Return a trainer over a tiny model, ready to fit here; `more` is the trainer's."""
    actor, frozen = Actor(tiny_llama()), Actor(reference or tiny_llama())
    needs = LOSSES[more.get("loss_type", "kto")].needs_z_ref
    loader = KTODataLoader(rows, batch, micro, seed=seed, needs_mismatched=needs)
    if eval_rows is not None:
        more["eval_dataloader"] = KTODataLoader(eval_rows, None, micro, needs_mismatched=needs)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=l2)
    frozen.requires_grad_(False).eval()
    return KTOTrainer(
        model=Engine(actor, optimizer), ref_model=frozen, tokenizer=None, strategy=StandIn(), optim=optimizer,
        train_dataloader=loader, beta=beta, **{"services": Services(stop=StopRequest())} | more,
        scheduler=create_scheduler(optimizer, schedule, total_steps=steps, warmup_ratio=warmup_ratio),
    )  # fmt: skip


def prepared(**more: Any) -> KTOTrainer:
    """Return the trainer of a run with all that changes from step to step: a schedule, decay, two epochs."""
    settings = {
        "schedule": "cosine",
        "warmup_ratio": 0.3,
        "l2": 0.1,
        "lr": 3e-4,
        "batch": 8,
        "micro": 8,
        "steps": STEPS,
    }
    return plain_trainer(token_rows([True, False, False] * 7), **settings | more)


def start_here(folder: Path, args: dict[str, Any] | None = None, **more: Any) -> KTOTrainer:
    """Train as one start of the command does, in this process; return the trainer."""
    trainer = prepared(**more)
    trainer.fit(quiet_args(folder, STEPS, **{"load_checkpoint": True} | (args or {})))
    return trainer
