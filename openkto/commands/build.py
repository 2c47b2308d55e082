"""Builds a command's parts from the configuration: models' names, tokenizer, strategy, actors, loaders, trainer."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from openkto.batches.loader import DEFAULT_ROWS, WITHOUT_GRADIENT, KTODataLoader
from openkto.commands.rows import load_tokenizer_of
from openkto.config import (
    LoraConfig,
    RunConfig,
    is_adapter_folder,
    policy_name,
    ref_is_adapter,
    reference_name,
    settings_for,
    trains_adapter,
)
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.distributed.sharded import direct_forward
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.distributed.zero_options import ZeroOptions
from openkto.errors import ConfigError
from openkto.models import Actor
from openkto.models.adapter import base_of
from openkto.models.empty import has_experts
from openkto.models.loading import check_same_vocabulary, choose_attention, load_config
from openkto.models.loss import KTOLoss
from openkto.models.revision import split_revision
from openkto.models.split_plan import check_heads, check_split
from openkto.process.watchdog import Watchdog
from openkto.trainer import FitArgs, KTOTrainer, Services
from openkto.trainer.largest_micro_batch import settle_tokens
from openkto.trainer.reference import CachedReference
from openkto.trainer.schedule import create_scheduler, total_steps

# Nats a token by which a model's own logits may differ from ours: kernels' round-off, far below a wrong head.
HEAD_TOLERANCE = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.03}


class Models(NamedTuple):
    """Where the policy and the reference are loaded from."""

    policy: str
    reference: str


def model_names(config: RunConfig) -> Models:
    """Return where the models are to be loaded from, fetched from ModelScope first if asked."""
    names = policy_name(config.model), reference_name(config.model)
    if not config.model.use_ms:
        return Models(*names)
    from modelscope import snapshot_download

    parts = ((name, *split_revision(name)) for name in names)
    return Models(
        *(
            name if Path(name).is_dir() else snapshot_download(repository, revision=revision)
            for name, repository, revision in parts
        )
    )


def check_models(config: RunConfig, models: Models) -> PreTrainedTokenizerBase:
    """Return the policy's tokenizer; both models and the settings must go together.

    Raises:
        ConfigError: they do not.
    """
    pretrain, reference = models
    choose_attention(config.model.attn_implementation)
    model_config = load_config(pretrain, config.model.trust_remote_code)
    tokenizer = load_tokenizer_of(config, pretrain)
    if reference != pretrain:
        load_config(reference, config.model.trust_remote_code)
        check_same_vocabulary(tokenizer, reference, config.model.trust_remote_code)
    check_split(model_config, config.deepspeed.tensor_parallel_size)
    check_heads(model_config, config.deepspeed.sequence_parallel_size, "--sequence_parallel_size", repeats_keys=True)
    if config.loss.aux_loss_coef > 0 and not has_experts(model_config, config.model.trust_remote_code):
        raise ConfigError(
            f"--aux_loss_coef: needs a mixture-of-experts model; got {pretrain}, a dense {model_config.model_type}. "
            "Leave it out."
        )
    starts = (pretrain, reference, base_of(pretrain), base_of(reference))
    if os.path.realpath(config.output.save_path) in map(os.path.realpath, starts):
        raise ConfigError(
            "--save_path: must not be the folder of a model that the run starts from; got "
            f"{config.output.save_path}. Name another folder."
        )
    return tokenizer


def make_strategy(config: RunConfig) -> DeepspeedStrategy:
    """Return the strategy that the configuration asks for."""
    settings = settings_for(DeepspeedStrategy, config.model, config.train, config.optim, config.deepspeed) | {
        "micro_train_batch_size": config.train.micro_train_batch_size or DEFAULT_ROWS,
        "grad_accum_dtype": config.deepspeed.grad_accum_dtype or "fp32",
    }
    return DeepspeedStrategy(zero=ZeroOptions(**settings_for(ZeroOptions, config.deepspeed)), **settings)


def load_actor(config: RunConfig, pretrain: str, dtype: Any, *, trains: bool) -> Actor:
    """Return an `Actor` over the model of that name."""
    settings = settings_for(Actor, config.model) | {
        "gradient_checkpointing": trains and config.model.gradient_checkpointing,
        "use_reentrant": trains and config.model.gradient_checkpointing_use_reentrant,
    }
    return Actor(
        pretrain,
        dtype=dtype,
        compile_backend="inductor" if config.model.torch_compile else None,
        lora=config.lora if trains else LoraConfig(load_in_4bit=config.lora.load_in_4bit),
        keeps_start=trains and ref_is_adapter(config.model, has_adapter=trains_adapter(config)),
        **settings,
    )


def load_models(
    config: RunConfig, strategy: DeepspeedStrategy, models: Models, *, is_cached: bool, trains: bool
) -> tuple[Actor, Actor | None]:
    """Return the policy, and the reference where it is neither a cache nor the policy itself."""
    has_adapter = is_adapter_folder(models.policy) or (trains and config.lora.lora_rank > 0)
    needs_reference = not is_cached and not ref_is_adapter(config.model, has_adapter=has_adapter)
    with strategy.model_loading():
        actor = load_actor(config, models.policy, strategy.load_dtype, trains=trains)
        reference = load_actor(config, models.reference, strategy.load_dtype, trains=False) if needs_reference else None
    return actor, reference


def check_reference(config: RunConfig, strategy: DeepspeedStrategy, actor: Actor, prepared: nn.Module) -> None:
    """Compare a reference's short forward with its own logits, where its forwards run."""
    place = "--pretrain" if config.model.ref_pretrain is None else "--ref_pretrain"
    with strategy.reference_forward(prepared), direct_forward(actor):
        actor.check_forward(HEAD_TOLERANCE[strategy.precision], place)


Loaders = tuple[KTODataLoader, dict[str, KTODataLoader]]  # of the training rows, and of the evaluation sets by name


def make_loaders(
    config: RunConfig,
    strategy: DeepspeedStrategy,
    rows: UnpairedPreferenceDataset,
    eval_rows: dict[str, UnpairedPreferenceDataset],
) -> Loaders:
    """Return the loader of the training rows, and those of the evaluation sets by name."""
    train = config.train
    loader = KTODataLoader(rows, train.train_batch_size, seed=train.seed, **_loader_settings(config, strategy))
    return loader, make_eval_loaders(config, strategy, eval_rows)


def make_eval_loaders(
    config: RunConfig, strategy: DeepspeedStrategy, eval_rows: dict[str, UnpairedPreferenceDataset]
) -> dict[str, KTODataLoader]:
    """Return the loaders of the evaluation sets by name."""
    settings = _loader_settings(config, strategy)
    return {name: KTODataLoader(found, None, **settings) for name, found in eval_rows.items()}


def _loader_settings(config: RunConfig, strategy: DeepspeedStrategy) -> dict[str, Any]:
    tokens, kind = config.train.max_tokens_per_micro_batch, strategy.device.type
    return {
        "micro_train_batch_size": config.train.micro_train_batch_size,
        "max_tokens_per_micro_batch": tokens if isinstance(tokens, int) else None,
        "rank": strategy.data_rank,
        "world_size": strategy.data_size,
        "needs_mismatched": config.loss.facts.needs_z_ref,
        "shared_by": strategy.sequence_parallel_size,
        "larger_without_gradient": WITHOUT_GRADIENT[kind],
        "pin_memory": kind == "cuda",
    }


def check_forwards(
    config: RunConfig, strategy: DeepspeedStrategy, actor: Actor, reference: Actor | None, prepared: nn.Module | None
) -> None:
    """Compare short forwards of the policy, and of a reference beside it, with the models' own logits.

    Args:
        prepared: the reference as the strategy has prepared it.

    Raises:
        ConfigError: they differ; see `Actor.check_forward`.
    """
    tolerance = HEAD_TOLERANCE[strategy.precision]
    with direct_forward(actor):
        actor.check_forward(tolerance, with_balancing_loss=config.loss.aux_loss_coef > 0)
    if reference is not None and prepared is not None:
        check_reference(config, strategy, reference, prepared)


def measure_micro_batches(
    config: RunConfig,
    strategy: DeepspeedStrategy,
    engine: Any,
    loaders: list[KTODataLoader],
    watchdog: Watchdog,
    *,
    with_gradient: bool = True,
) -> None:
    """Give the loaders the largest micro-batches that fit, where that is asked for; all ranks must call it."""
    if config.train.max_tokens_per_micro_batch != "auto":
        return
    watchdog.phase("measuring how large a micro-batch may be")
    longest = max(loader.longest for loader in loaders)
    tokens = settle_tokens(engine, strategy, longest, watchdog.beat, with_gradient=with_gradient)
    for loader in loaders:
        loader.layout = replace(loader.layout, measured_tokens=-(-tokens // loader.layout.shared_by))


def fit_args(config: RunConfig, **more: Any) -> FitArgs:
    """Return the `FitArgs` that the configuration holds."""
    return FitArgs(**settings_for(FitArgs, config.train, config.output, config.checkpoint), **more)


def make_trainer(
    config: RunConfig,
    strategy: DeepspeedStrategy,
    tokenizer: PreTrainedTokenizerBase,
    actor: Actor,
    reference: Actor | CachedReference | None,
    loaders: Loaders,
    export_dtype: torch.dtype,
    services: Services,
) -> KTOTrainer:
    """Return the `KTOTrainer` with its optimizer and schedule, ready to fit.

    Args:
        reference: None where the policy is its own.
        export_dtype: of the saved model.
    """
    train, optim = config.train, config.optim
    loader, eval_loaders = loaders
    strategy.share_model(actor)
    assert optim.learning_rate is not None, "the command has settled it"
    optimizer = strategy.create_optimizer(actor, lr=optim.learning_rate, betas=optim.adam_betas, weight_decay=optim.l2)
    scheduler = create_scheduler(
        optimizer,
        optim.lr_scheduler,
        total_steps=total_steps(len(loader), train.max_epochs, train.max_steps),
        warmup_ratio=optim.lr_warmup_ratio,
        min_lr_ratio=optim.min_lr_ratio,
    )
    cached = reference if isinstance(reference, CachedReference) else None
    own = None if isinstance(reference, CachedReference) else reference
    (engine, optimizer, scheduler), ref_model = strategy.prepare((actor, optimizer, scheduler), own)
    settings = settings_for(KTOTrainer, config.model, config.train, config.optim, config.checkpoint)
    return KTOTrainer(
        model=engine,
        ref_model=cached or ref_model,
        tokenizer=tokenizer,
        strategy=strategy,
        optim=optimizer,
        train_dataloader=loader,
        eval_dataloader=eval_loaders,
        scheduler=scheduler,
        loss=KTOLoss.of(config.loss),
        services=services,
        **settings | {"export_dtype": export_dtype},
    )
