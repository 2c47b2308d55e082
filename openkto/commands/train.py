"""`openkto train`, `cli/train_kto.py`: from labelled rows and a model to a trained model.

Read `main` from the top: it is the whole way from the command line to the saved model.
"""

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

from openkto.config import (
    LoraConfig,
    RunConfig,
    openrlhf_differences,
    policy_name,
    ref_is_adapter,
    reference_name,
    to_flat,
    trains_adapter,
    with_resolved,
)
from openkto.config.flags import RunOptions, parse
from openkto.config.values import seconds_of
from openkto.errors import ConfigError, StopError
from openkto.process.run_lock import RunLocks
from openkto.process.stops import StopRequest

log = logging.getLogger(__name__)

# Nats a token by which a model's own logits may differ from ours: kernels' round-off, far below a wrong head.
HEAD_TOLERANCE = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.03}


def main(argv: list[str]) -> None:
    """Train as the command line says.

    Raises:
        OpenKTOError: something that the user can act on.
    """
    config, options = parse(argv, "train")
    say_what_differs(config, options)
    limit = config.checkpoint.max_time
    with StopRequest(None if limit is None else seconds_of(limit)) as stop:
        # Only now what takes seconds to import, so that a wrong flag is answered at once.
        from openkto.process.watchdog import Watchdog

        settings = config.checkpoint
        dog = Watchdog(
            settings.stall_minutes,
            int(os.environ.get("RANK", "0")),
            end_minutes=settings.stall_end_minutes,
            stop=stop,
            can_go_on=not settings.disable_ds_ckpt,
        )
        with dog as watchdog, RunLocks() as locks:
            train(config, options, stop, watchdog, locks)


def train(config: RunConfig, options: RunOptions, stop: StopRequest, watchdog: Any, locks: RunLocks) -> None:
    """Go the whole way from a configuration to a saved model."""
    from openkto.commands.check import is_check
    from openkto.commands.data import read_sets, stops_of_rows, weights_of_classes
    from openkto.commands.folder import check_replaces_nothing, take_folders, write_run_file
    from openkto.commands.outlook import learning_rate_of, say_outlook
    from openkto.commands.reference import cached_reference
    from openkto.commands.resume import checkpoint_bytes, identity_of_command, is_done, on_one_day
    from openkto.commands.same_run import fetch_models, settings_of
    from openkto.distributed.agreement import on_some_ranks
    from openkto.models.export import check_space
    from openkto.models.loading import DTYPES
    from openkto.models.model_files import exported_files
    from openkto.trainer.newest import find_checkpoint
    from openkto.trainer.saving import open_checkpoints

    watchdog.phase("reading the models' configurations")
    models = model_names(config)
    tokenizer = check_models(config, *models)
    strategy = make_strategy(config)
    if is_check(config, options, models, tokenizer):
        return
    watchdog.phase("waiting for all ranks")
    strategy.setup_distributed(settings_of(config))
    is_first, folder = strategy.rank == 0, Path(config.output.save_path)
    on_some_ranks(strategy, lambda: take_folders(config, locks), is_mine=is_first)
    watchdog.phase("fetching the models")
    fetch_models(strategy, models)
    watchdog.phase("looking for a checkpoint")
    checkpoints = open_checkpoints(fit_args(config), strategy, with_engine=not config.checkpoint.disable_ds_ckpt)
    found = find_checkpoint(checkpoints, config.checkpoint.load_checkpoint)
    on_some_ranks(strategy, lambda: check_replaces_nothing(config, found), is_mine=is_first)
    config = on_one_day(config, strategy, tokenizer, found)
    watchdog.phase("reading the data")
    rows, eval_rows = read_sets(config, strategy, tokenizer, models)
    weights = weights_of_classes(config.loss, rows)
    config = with_resolved(
        config,
        param_dtype=strategy.precision,
        learning_rate=learning_rate_of(config),
        desirable_loss_weight=weights[0],
        undesirable_loss_weight=weights[1],
    )
    say_outlook(config, rows)
    stops = stops_of_rows(rows, models[0], config.model.trust_remote_code)
    watchdog.phase("hashing the models' files")
    identity = identity_of_command(config, strategy, rows, models)
    watchdog.phase("looking for a checkpoint")
    args = fit_args(config, settings=to_flat(config), identity=identity)
    writes_checkpoints = checkpoints.with_engine or config.checkpoint.save_hf_ckpt
    if writes_checkpoints:
        checkpoints.make_folder()
    loader, eval_loaders = make_loaders(config, strategy, rows, eval_rows)
    if found is not None and is_done(config, checkpoints, found, identity, loader):
        return
    caches = [loader, *eval_loaders.values()]
    cached = cached_reference(config, strategy, caches, identity, models[1], watchdog, stop)
    watchdog.phase("loading the models")
    with strategy.model_loading():
        actor = load_actor(config, models[0], strategy.load_dtype, trains=True)
        is_own_reference = ref_is_adapter(config.model, has_adapter=actor.has_adapter)
        needs_model = cached is None and not is_own_reference
        ref_actor = load_actor(config, models[1], strategy.load_dtype, trains=False) if needs_model else None
    watchdog.phase("preparing the models")
    dtype = DTYPES[config.model.export_dtype or strategy.precision]
    running = {"export_dtype": dtype, "checkpoints": checkpoints, "stop": stop, "watchdog": watchdog}
    trainer = make_trainer(config, strategy, tokenizer, (actor, ref_actor or cached), loader, eval_loaders, **running)
    if actor.has_adapter:
        log.info("the adapter's %d parameters train, of %d", trainer.num_trainable, trainer.num_parameters)
        log.info("the adapter is on %s", actor.describe_adapter())
    own = "the policy as it starts" if is_own_reference else models[1]
    log.info("the reference is %s%s", own, ", from the cache" if cached is not None else "")
    actor.stop_also_at(stops)
    balances = config.loss.aux_loss_coef > 0
    with strategy.direct_forward(actor):
        actor.check_forward(HEAD_TOLERANCE[strategy.precision], with_balancing_loss=balances)
    if ref_actor is not None:
        check_reference(config, strategy, ref_actor, trainer.ref_model)
    measure_micro_batches(config, strategy, trainer.model, [loader, *eval_loaders.values()], watchdog)
    on_some_ranks(strategy, lambda: check_space(folder, trainer.num_trainable, dtype), is_mine=is_first)
    if writes_checkpoints:
        checkpoints.check_space(checkpoint_bytes(config, trainer, strategy.zero_stage))
    on_some_ranks(strategy, lambda: write_run_file(config, folder), is_mine=is_first)
    try:
        trainer.fit(args)
    except StopError:
        # A launcher ends all ranks when one is gone, and the first may still be closing its trackers.
        strategy.barrier()
        raise
    watchdog.phase("saving the model", is_saving=True)
    trainer.save_model(config.output.save_path)
    log.info("the model is in %s", config.output.save_path)
    checkpoints.mark_finished(trainer.total_steps(config.train.max_steps), folder, exported_files(folder))
    strategy.barrier()


def check_models(config: RunConfig, pretrain: str, reference: str) -> Any:
    """Return the policy's tokenizer; both models and the settings must go together.

    Raises:
        ConfigError: they do not.
    """
    from openkto.models.adapter import base_of
    from openkto.models.empty import has_experts
    from openkto.models.loading import check_same_vocabulary, choose_attention, load_config
    from openkto.models.split_plan import check_heads, check_split

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


def fit_args(config: RunConfig, **more: Any) -> Any:
    """Return the `FitArgs` that the configuration holds."""
    from openkto.trainer import FitArgs

    flat = to_flat(config)
    return FitArgs(
        **{field.name: flat[field.name] for field in dataclasses.fields(FitArgs) if field.name in flat}, **more
    )


def make_loaders(config: RunConfig, strategy: Any, rows: Any, eval_rows: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the loader of the training rows, and those of the evaluation sets by name."""
    from openkto.batches.loader import KTODataLoader

    train = config.train
    loader = KTODataLoader(rows, train.train_batch_size, seed=train.seed, **loader_settings(config, strategy))
    return loader, make_eval_loaders(config, strategy, eval_rows)


def make_eval_loaders(config: RunConfig, strategy: Any, eval_rows: dict[str, Any]) -> dict[str, Any]:
    """Return the loaders of the evaluation sets by name."""
    from openkto.batches.loader import KTODataLoader

    settings = loader_settings(config, strategy)
    return {name: KTODataLoader(found, None, **settings) for name, found in eval_rows.items()}


def loader_settings(config: RunConfig, strategy: Any) -> dict[str, Any]:
    """Return what the loaders of training and evaluation rows have in common."""
    from openkto.batches.loader import WITHOUT_GRADIENT

    train, tokens = config.train, config.train.max_tokens_per_micro_batch
    return {
        "micro_train_batch_size": train.micro_train_batch_size,
        "max_tokens_per_micro_batch": tokens if isinstance(tokens, int) else None,
        "rank": strategy.data_rank,
        "world_size": strategy.data_size,
        "shared_by": strategy.sequence_parallel_size,
        "needs_mismatched": config.loss.facts.needs_z_ref,
        "larger_without_gradient": WITHOUT_GRADIENT[strategy.device.type],
        "pin_memory": strategy.device.type == "cuda",
    }


def check_reference(config: RunConfig, strategy: Any, actor: Any, prepared: Any) -> None:
    """Compare a reference's short forward with its own logits, where its forwards run."""
    place = "--pretrain" if reference_name(config.model) == policy_name(config.model) else "--ref_pretrain"
    with strategy.reference_forward(prepared), strategy.direct_forward(actor):
        actor.check_forward(HEAD_TOLERANCE[strategy.precision], place)


def measure_micro_batches(
    config: RunConfig, strategy: Any, engine: Any, loaders: list[Any], watchdog: Any, *, with_gradient: bool = True
) -> None:
    """Give the loaders the largest micro-batches that fit, where that is asked for; all ranks must call it."""
    if config.train.max_tokens_per_micro_batch != "auto":
        return
    from openkto.trainer.largest_micro_batch import settle_tokens

    watchdog.phase("measuring how large a micro-batch may be")
    longest = max(loader.dataset.longest_and_largest()[0] for loader in loaders)
    tokens = settle_tokens(engine, strategy, longest, watchdog.beat, with_gradient=with_gradient)
    for loader in loaders:
        loader.max_tokens = -(-tokens // loader.shared_by)


def make_trainer(
    config: RunConfig,
    strategy: Any,
    tokenizer: Any,
    models: tuple[Any, Any],
    loader: Any,
    eval_loaders: dict[str, Any],
    **running: Any,
) -> Any:
    """Return the `KTOTrainer` with its optimizer and schedule, ready to fit.

    Args:
        models: the policy's `Actor`; the reference's, a `CachedReference`, or None where the policy is its own.
        running: what `KTOTrainer` takes beside settings: checkpoints, stop, watchdog, export_dtype.
    """
    from openkto.models.loss import KTOLoss
    from openkto.trainer import KTOTrainer
    from openkto.trainer.reference import CachedReference
    from openkto.trainer.schedule import create_scheduler, total_steps

    train, optim = config.train, config.optim
    actor, reference = models
    strategy.share_model(actor)
    optimizer = strategy.create_optimizer(actor, lr=optim.learning_rate, betas=optim.adam_betas, weight_decay=optim.l2)
    scheduler = create_scheduler(
        optimizer,
        optim.lr_scheduler,
        total_steps=total_steps(len(loader), train.max_epochs, train.max_steps),
        warmup_ratio=optim.lr_warmup_ratio,
        min_lr_ratio=optim.min_lr_ratio,
    )
    is_cached = isinstance(reference, CachedReference)
    (engine, optimizer, scheduler), ref_model = strategy.prepare(
        (actor, optimizer, scheduler), None if is_cached else reference
    )
    return KTOTrainer(
        model=engine,
        ref_model=reference if is_cached else ref_model,
        tokenizer=tokenizer,
        strategy=strategy,
        optim=optimizer,
        train_dataloader=loader,
        eval_dataloader=eval_loaders,
        scheduler=scheduler,
        max_norm=optim.max_norm,
        loss=KTOLoss.of(config.loss),
        max_epochs=train.max_epochs,
        ref_sync_steps=config.model.ref_sync_steps,
        ref_sync_alpha=config.model.ref_sync_alpha,
        save_hf_ckpt=config.checkpoint.save_hf_ckpt,
        disable_ds_ckpt=config.checkpoint.disable_ds_ckpt,
        **running,
    )


def say_what_differs(config: RunConfig, options: RunOptions) -> None:
    """Log the configuration's warnings, and where it is asked for the defaults that differ from OpenRLHF's."""
    if options.openrlhf_defaults:
        lines = openrlhf_differences(options.given, use_wandb=config.output.use_wandb)
        log.info("defaults that are others in OpenRLHF, and were not given: %s", "; ".join(lines))
    for line in options.warnings:
        log.warning("warning: %s", line)


def model_names(config: RunConfig) -> tuple[str, str]:
    """Return where the policy and the reference are to be loaded from, fetched from ModelScope first if asked."""
    names = policy_name(config.model), reference_name(config.model)
    if not config.model.use_ms:
        return names
    from modelscope import snapshot_download

    from openkto.models.revision import split_revision

    parts = ((name, *split_revision(name)) for name in names)
    policy, reference = (
        name if Path(name).is_dir() else snapshot_download(repository, revision=revision)
        for name, repository, revision in parts
    )
    return policy, reference


def load_tokenizer_of(config: RunConfig, pretrain: str) -> Any:
    """Return the model's tokenizer."""
    from openkto.models.loading import load_tokenizer

    return load_tokenizer(
        pretrain,
        use_fast=not config.model.disable_fast_tokenizer,
        trust_remote_code=config.model.trust_remote_code,
    )


def make_strategy(config: RunConfig) -> Any:
    """Return the strategy that the configuration asks for."""
    from openkto.batches.loader import DEFAULT_ROWS
    from openkto.distributed.strategy import DeepspeedStrategy
    from openkto.distributed.zero_options import ZeroOptions

    settings = config.deepspeed
    return DeepspeedStrategy(
        zero_stage=settings.zero_stage,
        param_dtype=config.model.param_dtype,  # type: ignore[arg-type]  # checked by the parser
        train_batch_size=config.train.train_batch_size,
        micro_train_batch_size=config.train.micro_train_batch_size or DEFAULT_ROWS,
        max_norm=config.optim.max_norm,
        grad_accum_dtype=settings.grad_accum_dtype or "fp32",  # type: ignore[arg-type]
        zero=ZeroOptions(**{field.name: vars(settings)[field.name] for field in dataclasses.fields(ZeroOptions)}),
        ref_offload=settings.ref_offload,
        deepcompile=settings.deepcompile,
        tensor_parallel_size=settings.tensor_parallel_size,
        sequence_parallel_size=settings.sequence_parallel_size,
        ds_config=settings.ds_config,
        seed=config.train.seed,
        full_determinism=config.train.full_determinism,
    )


def load_actor(config: RunConfig, pretrain: str, dtype: Any, *, trains: bool) -> Any:
    """Return an `Actor` over the model of that name."""
    from openkto.models import Actor

    return Actor(
        pretrain,
        dtype=dtype,
        attn_implementation=config.model.attn_implementation,
        packing=config.model.packing,  # type: ignore[arg-type]  # checked by the parser
        trust_remote_code=config.model.trust_remote_code,
        gradient_checkpointing=trains and config.model.gradient_checkpointing,
        use_reentrant=trains and config.model.gradient_checkpointing_use_reentrant,
        use_liger_kernel=config.model.use_liger_kernel,
        compile_backend="inductor" if config.model.torch_compile else None,
        lora=config.lora if trains else LoraConfig(load_in_4bit=config.lora.load_in_4bit),
        keeps_start=trains and ref_is_adapter(config.model, has_adapter=trains_adapter(config)),
    )
