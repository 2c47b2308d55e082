"""A tiny model, token rows without a tokenizer, and every loss written plainly from its definition, in float64."""

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from openkto.batches.loader import KTODataLoader
from openkto.batches.micro_batch import cut_pairs
from openkto.batches.pairs import pairs_of_run, sequence_key
from openkto.config import LOSSES
from openkto.data.truncation import cut
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.models import Actor
from openkto.trainer import FitArgs, KTOTrainer
from openkto.trainer.reference import CachedReference
from openkto.trainer.schedule import create_scheduler

VOCABULARY = 61


def tiny_llama(seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """Return a random float32 Llama of two layers, hidden 32."""
    torch.manual_seed(seed)
    settings = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | changes)))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@dataclass
class TokenRowList:
    """Rows of random tokens behind the interface that the loader asks for."""

    items: list[dict]
    prompt_keys: np.ndarray
    max_len: int = 64
    truncation: str = "completion"
    pad_token_id: int = 0
    bos_token_id: int | None = None
    name: str = "rows"
    rows: np.ndarray = field(init=False)
    labels: np.ndarray = field(init=False)
    completion_keys: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.rows = np.array([item["row"] for item in self.items], dtype=np.int64)
        self.labels = np.array([item["label"] for item in self.items])
        seen: dict[tuple[int, ...], int] = {}
        keys = [seen.setdefault(tuple(item["completion_ids"]), len(seen)) for item in self.items]
        self.completion_keys = np.array(keys, dtype=np.int64)
        self.prompt_lengths = np.array([len(item["prompt_ids"]) for item in self.items], dtype=np.int32)
        self.completion_lengths = np.array([len(item["completion_ids"]) for item in self.items], dtype=np.int32)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict:
        return self.items[i]

    def cut(self, prompt_ids, completion_ids, completion_mask):
        return cut(
            prompt_ids, completion_ids, completion_mask,
            max_len=self.max_len, truncation=self.truncation, bos_token_id=self.bos_token_id,
        )  # fmt: skip

    def cut_lengths(self, prompt_lengths, completion_lengths):
        return np.minimum(prompt_lengths + completion_lengths, self.max_len)


def token_rows(
    labels: list[bool], seed: int = 0, longest: int = 12, weights: list[float] | None = None, answers: int = 1
) -> TokenRowList:
    """Return rows of random completions with these labels, and weights of their own.

    Args:
        answers: how many rows, one after the other, have a prompt in common; other prompts are distinct.
    """
    random = np.random.default_rng(seed)
    items: list[dict] = []
    prompt: list[int] = []
    for row, label in enumerate(labels):
        if row % answers == 0:
            prompt = random.integers(3, VOCABULARY, random.integers(1, longest)).tolist()
        completion = random.integers(3, VOCABULARY, random.integers(1, longest)).tolist()
        mask = [True] * len(completion)
        items.append(
            {
                "row": row,
                "prompt_ids": prompt,
                "completion_ids": completion,
                "completion_mask": mask,
                "label": label,
                "weight": 1.0 if weights is None else weights[row],
            }
        )
    return TokenRowList(items, np.arange(len(items), dtype=np.int64) // answers)


@dataclass(frozen=True)
class OracleStep:
    """One step's values in float64."""

    loss: float
    z_ref: float
    grad_norm: float
    log_ratios: list[float]
    sft_loss: float


class Oracle:
    """Every loss on the global batch as its definition says: one row at a time, float64, plain AdamW.

    Args:
        loss_type, label_smoothing, sft_loss_coef: as the trainer's.
        bounds: of a token's log-ratio, for kto_humanline.
    """

    def __init__(
        self, model, *, beta: float, weights=(1.0, 1.0), lr: float, max_norm: float = 1.0, reference=None,
        loss_type="kto", label_smoothing=0.0, sft_loss_coef=0.0, bounds=(-1.0, 1.5),
    ):  # fmt: skip
        self.policy = copy.deepcopy(model).double()
        self.reference = copy.deepcopy(reference if reference is not None else model).double()
        self.beta, self.weights, self.max_norm = beta, weights, max_norm
        self.loss_type, self.smoothing, self.sft_loss_coef, self.bounds = (
            loss_type, label_smoothing, sft_loss_coef, bounds,
        )  # fmt: skip
        self.seen: list[float] = []  # the log-ratios of all rows of all steps, for bco
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, items: list[dict], partners: list[dict], lr: float | None = None) -> OracleStep:
        """Train on rows whose prompts are paired with the partners' completions (none where the loss needs none)."""
        point = self._reference_point(items, partners)
        total, sft, log_ratios = 0.0, 0.0, []
        desirable_tokens = sum(sum(item["completion_mask"]) for item in items if item["label"])
        self.optimizer.zero_grad()
        for item in items:
            ratio = self._log_ratio(item, item)
            sign, weight = (1.0, self.weights[0]) if item["label"] else (-1.0, self.weights[1])
            right, wrong = (self._value(self.beta * s * (ratio - point)) for s in (sign, -sign))
            row_loss = (1 - self.smoothing) * right + self.smoothing * wrong
            loss = weight * item["weight"] * row_loss / len(items)
            total += float(loss.detach())
            if item["label"]:
                part = -self._log_prob(self.policy, item, item) / desirable_tokens
                sft += float(part.detach())
                loss = loss + self.sft_loss_coef * part
            loss.backward()
            log_ratios.append(float(ratio.detach()))
        self.seen += log_ratios
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_norm))
        if lr is not None:
            self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        return OracleStep(total, point, norm, log_ratios, sft)

    def _value(self, margin: torch.Tensor) -> torch.Tensor:
        probability = 1 / (1 + torch.exp(-margin))
        return -torch.log(probability) if self.loss_type == "bco" else 1 - probability

    def _reference_point(self, items: list[dict], partners: list[dict]) -> float:
        if self.loss_type == "apo_zero_unpaired":
            return 0.0
        if self.loss_type == "bco":
            return sum(self.seen) / len(self.seen) if self.seen else 0.0
        with torch.no_grad():
            k = [float(self._log_ratio(x, y)) for x, y in zip(items, partners, strict=True)]
        return max(0.0, sum(k) / len(k))

    def _log_ratio(self, prompt: dict, completion: dict) -> torch.Tensor:
        with torch.no_grad():
            reference = self._token_log_probs(self.reference, prompt, completion)
        tokens = self._token_log_probs(self.policy, prompt, completion) - reference
        if self.loss_type == "kto_humanline":
            low, high = self.bounds
            tokens = torch.stack(
                [
                    t if low < float(t.detach()) < high else 0 * t + min(max(float(t.detach()), low), high)
                    for t in tokens
                ]
            )
        mean = self.loss_type == "kto_length_normalized"
        return tokens.sum() / (len(tokens) if mean else 1)

    @classmethod
    def _log_prob(cls, model, prompt: dict, completion: dict) -> torch.Tensor:
        return cls._token_log_probs(model, prompt, completion).sum()

    @staticmethod
    def _token_log_probs(model, prompt: dict, completion: dict) -> torch.Tensor:
        ids = torch.tensor([prompt["prompt_ids"] + completion["completion_ids"]])
        logits = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        tokens = logits.gather(-1, ids[0, 1:, None]).squeeze(-1)[len(prompt["prompt_ids"]) - 1 :]
        return tokens[torch.tensor(completion["completion_mask"])]


class Count(TorchDispatchMode):
    """Counts the operators that run: not those whose result selective checkpointing has kept."""

    def __init__(self):
        super().__init__()
        self.runs = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.runs[operator._schema.name] += 1
        return operator(*args, **(kwargs or {}))


def make_trainer(rows: TokenRowList, *, model=None, zero_stage=0, batch=8, micro=8, lr=1e-3, steps=3, beta=0.1, **more):
    """Return (trainer, strategy) over a tiny model, ready to fit; call it in a process of a run."""
    strategy = DeepspeedStrategy(
        zero_stage=zero_stage,
        param_dtype=more.pop("param_dtype", "fp32"),
        max_norm=more.get("max_norm", 1.0),
        ds_config=more.pop("ds_config", None),
        zero=more.pop("zero", None),
        tensor_parallel_size=more.pop("tensor_parallel_size", 1),
        sequence_parallel_size=more.pop("sequence_parallel_size", 1),
    )
    if zero_stage == 3:
        # Else a tiny model's parameters all stay whole, and nothing would be tested.
        strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    strategy.setup_distributed()
    settings = {
        "gradient_checkpointing": more.pop("gradient_checkpointing", False),
        "use_reentrant": more.pop("use_reentrant", False),
        "compile_backend": more.pop("compile_backend", None),
        "share_prompts": more.pop("share_prompts", "auto"),
    }
    ref_mode = more.pop("ref_mode", "model")
    is_own_reference = ref_mode == "adapter"
    source, reference = (model or tiny_llama)(), None
    loading = {"dtype": strategy.load_dtype} if isinstance(source, str) else {}
    with strategy.model_loading():
        actor = Actor(source, **settings, **loading, lora=more.pop("lora", None), keeps_start=is_own_reference)
        other = more.pop("reference", None) or model or tiny_llama
        if ref_mode == "model":
            reference = Actor(other(), **loading)
    if not loading:
        actor, reference = (m and m.to(strategy.load_dtype) for m in (actor, reference))
    strategy.share_model(actor)
    place = {"rank": strategy.data_rank, "world_size": strategy.data_size, "shared_by": strategy.sequence_parallel_size}
    needs = LOSSES[more.get("loss_type", "kto")].needs_z_ref
    loader = KTODataLoader(rows, batch, micro, **place, seed=more.pop("seed", 1), needs_mismatched=needs)
    eval_rows = more.pop("eval_rows", None)
    if eval_rows is not None:
        more["eval_dataloader"] = KTODataLoader(eval_rows, None, micro, **place, needs_mismatched=needs)
    optimizer = strategy.create_optimizer(actor, lr=lr, weight_decay=more.pop("l2", 0.0))
    schedule = more.pop("schedule", "constant")
    scheduler = create_scheduler(optimizer, schedule, total_steps=steps, warmup_ratio=more.pop("warmup_ratio", 0.0))
    (engine, optimizer, scheduler), reference = strategy.prepare((actor, optimizer, scheduler), reference)
    if ref_mode == "cached":  # as if the reference gave every completion the probability 1
        pairs = cut_pairs(rows, pairs_of_run(loader, steps))
        reference = CachedReference({sequence_key(*pair): 0.0 for pair in pairs}, strategy.device)
    trainer = KTOTrainer(
        model=engine, ref_model=reference, tokenizer=None, strategy=strategy, optim=optimizer, train_dataloader=loader,
        scheduler=scheduler, beta=beta, **more,
    )  # fmt: skip
    return trainer, strategy


def quiet_args(folder, steps: int, **more) -> FitArgs:
    """Return fit's arguments for a run that writes its metrics and, unless it is stopped, nothing else."""
    return FitArgs(save_path=str(folder), max_steps=steps, use_tensorboard="none", **({"save_steps": 0} | more))
