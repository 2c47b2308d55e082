"""The rules between settings, checked before any model loads. A setting's own range is part of its definition."""

from __future__ import annotations

import dataclasses
import os

from openkto.config import (
    FLOORED_SCHEDULES,
    CheckpointConfig,
    LoraConfig,
    LossConfig,
    OptimConfig,
    RunConfig,
    has_evaluation,
    is_adapter_folder,
    ref_is_adapter,
    trains_adapter,
)
from openkto.config.data_checks import check_data, check_holdout, check_mixing
from openkto.config.engine_checks import Place, check_engine, engine_warnings
from openkto.config.output_checks import check_output
from openkto.config.reference_checks import check_cache, check_models_differ, check_moving_reference, check_reference
from openkto.config.sample_checks import check_samples
from openkto.errors import fail as _fail
from openkto.errors import need_package

HIGH_LEARNING_RATE = 5e-5


def check(config: RunConfig, place: Place, command: str) -> list[str]:
    """Raise a ConfigError for the first rule of the command that is broken; return warnings, one sentence each."""
    _check_model(config, place)
    if os.path.isfile(config.output.save_path):
        _fail(place("save_path"), "must be a folder", f"the file {config.output.save_path!r}", "Give another path.")
    check_output(config.output, place)
    if command == "merge_lora":
        _check_merge(config, place)
        return []
    if command == "convert_checkpoint":
        if not isinstance(config.checkpoint.load_checkpoint, str):
            _fail(place("load_checkpoint"), "must be a checkpoint's folder", "true", "Name it, as .../global_step12.")
        return []
    check_data(config.data, place)
    if command != "plan":  # which may be made for another machine
        _check_packages(config, place)
    check_engine(config, place)
    if config.lora.load_in_4bit and config.deepspeed.zero_stage == 3:
        _fail(
            place("load_in_4bit"),
            "needs whole weights on each GPU",
            "--zero_stage 3, which shards them",
            "Take --zero_stage 2, or leave it out.",
        )
    _check_micro_batches(config, place)
    _check_humanline(config.loss, place)
    if command == "evaluate":
        _check_evaluation_weights(config.loss, place)
        check_reference(config, place, has_adapter=is_adapter_folder(config.model.pretrain))
        check_models_differ(config.model, place)
        check_cache(config, place, command)
        return []
    _check_lora(config, place)
    check_moving_reference(config, place)
    check_mixing(config.data, place)
    check_holdout(config.data, place)
    _check_loss(config, place)
    check_cache(config, place, command)
    for name, is_given in (
        ("num_samples", config.samples.num_samples > 0),
        ("eval_at_start", config.train.eval_at_start),
        ("keep_best", config.checkpoint.keep_best is not None),
    ):
        if is_given and not has_evaluation(config.data):
            cure = "Give one, pass --eval_fraction, or leave it out."
            _fail(place(name), "needs evaluation rows", "no --eval_dataset", cure)
    check_samples(config, place)
    if config.checkpoint.keep_best is not None and config.train.eval_steps == 0:
        _fail(place("keep_best"), "needs evaluations", "--eval_steps 0", "Raise --eval_steps, or leave it out.")
    _check_ending(config.checkpoint, place)
    return _training_warnings(config, place)


def _check_ending(saving: CheckpointConfig, place: Place) -> None:
    wanted = {
        "early_stop_patience": saving.early_stop_patience is not None,
        "load_best_at_end": saving.load_best_at_end,
    }
    for name, is_given in wanted.items():
        if is_given and saving.keep_best is None:
            cure = "Pass --keep_best rewards/auc, for example, or leave it out."
            _fail(place(name), "needs --keep_best, the metric that it follows", "none", cure)
    for name in ("save_failed_step", "load_best_at_end"):
        if vars(saving)[name] and saving.disable_ds_ckpt:
            _fail(place(name), "needs checkpoints", "--disable_ds_ckpt", "Leave one of them out.")


def _check_model(config: RunConfig, place: Place) -> None:
    model = config.model
    for name, path in (("pretrain", model.pretrain), ("ref_pretrain", model.ref_pretrain)):
        if path and path.startswith(("/", "./", "../")) and not os.path.isdir(path):
            _fail(place(name), "must be a Hugging Face name or a folder that exists", repr(path), "Check the path.")
    reference = model.ref_pretrain or model.pretrain
    for name, of, revision in (
        ("revision", model.pretrain, model.revision),
        ("ref_revision", reference, model.ref_revision),
    ):
        if revision is not None and os.path.isdir(of):
            _fail(place(name), "works only with a model on the Hub", f"the folder {of!r}", "Leave it out.")
        if revision is not None and "@" in of:
            _fail(place(name), "must be left out where the name holds a revision", f"the name {of}", "Leave one out.")


def _check_merge(config: RunConfig, place: Place) -> None:
    if not is_adapter_folder(config.model.pretrain):
        _fail(
            place("pretrain"),
            "must be the folder of an adapter, with its adapter_config.json",
            repr(config.model.pretrain),
            "Name the --save_path of a run with --lora_rank.",
        )


def _check_lora(config: RunConfig, place: Place) -> None:
    """Check the settings of a new adapter, or that they are left out where training starts from one."""
    lora, starts_from_adapter = config.lora, is_adapter_folder(config.model.pretrain)
    plain = LoraConfig(load_in_4bit=lora.load_in_4bit)
    given = [f.name for f in dataclasses.fields(lora) if vars(lora)[f.name] != vars(plain)[f.name]]
    if starts_from_adapter and set(given) - {"lora_dropout"}:
        name = next(name for name in given if name != "lora_dropout")
        _fail(
            place(name),
            f"must be left out, as training starts from the adapter {config.model.pretrain}, which has its own",
            _shown(vars(lora)[name]),
            "Leave it out, or start from the base model.",
        )
    if not starts_from_adapter and lora.lora_rank == 0 and (given or lora.load_in_4bit):
        name = given[0] if given else "load_in_4bit"
        _fail(place(name), "works only with --lora_rank", "--lora_rank 0", "Give a rank, such as 16, or leave it out.")
    check_reference(config, place, has_adapter=trains_adapter(config))


def _shown(value: object) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


def _check_packages(config: RunConfig, place: Place) -> None:
    if config.model.use_ms:
        need_package(place("use_ms"), "modelscope", "modelscope")
    if config.model.use_liger_kernel:
        need_package(place("use_liger_kernel"), "liger_kernel", "liger-kernel")
    if config.lora.load_in_4bit:
        need_package(place("load_in_4bit"), "bitsandbytes", "bitsandbytes")


def _check_micro_batches(config: RunConfig, place: Place) -> None:
    attention = config.model.attn_implementation
    if config.model.packing == "on" and attention in ("eager", "sdpa"):
        _fail(
            place("packing"),
            "needs attention that keeps packed rows apart",
            f"on with --attn_implementation {attention}",
            "Take auto for either.",
        )
    tokens = config.train.max_tokens_per_micro_batch
    sharers = config.deepspeed.sequence_parallel_size
    if isinstance(tokens, int) and tokens * sharers < config.data.max_len:
        shared = f" shared by {sharers} GPUs" if sharers > 1 else ""
        _fail(
            place("max_tokens_per_micro_batch"),
            f"must hold the longest row, --max_len {config.data.max_len}{shared}",
            str(tokens),
            "Raise it, or lower --max_len.",
        )


def _check_evaluation_weights(loss: LossConfig, place: Place) -> None:
    for name, weight in (
        ("desirable_loss_weight", loss.desirable_loss_weight),
        ("undesirable_loss_weight", loss.undesirable_loss_weight),
    ):
        if weight == "auto":
            _fail(
                place(name),
                "must be a number to evaluate: auto counts the training rows",
                "auto",
                "Give the number that training printed.",
            )


def _check_humanline(loss: LossConfig, place: Place) -> None:
    for name in ("humanline_low", "humanline_high"):
        if loss.loss_type != "kto_humanline" and getattr(loss, name) != getattr(LossConfig(), name):
            _fail(
                place(name),
                "works only with --loss_type kto_humanline",
                f"--loss_type {loss.loss_type}",
                "Take that, or leave it out.",
            )


def _check_loss(config: RunConfig, place: Place) -> None:
    loss = config.loss
    weights = (loss.desirable_loss_weight, loss.undesirable_loss_weight)
    if weights == ("auto", "auto"):
        _fail(
            place("undesirable_loss_weight"),
            "cannot be auto together with --desirable_loss_weight auto, as one is set by the other",
            "auto for both",
            "Give one of them a number.",
        )
    if weights == (0, 0):
        _fail(
            place("undesirable_loss_weight"),
            "cannot be 0 together with --desirable_loss_weight 0",
            "0 for both",
            "Raise one.",
        )
    if 0 in weights and "auto" in weights:
        _fail(
            place("desirable_loss_weight"),
            "cannot be auto together with a weight of 0",
            "auto and 0",
            "Give two numbers.",
        )
    if config.train.train_batch_size == 1 and loss.facts.needs_z_ref:
        _fail(
            place("train_batch_size"),
            f"must be at least 2 with --loss_type {loss.loss_type}, whose reference point pairs each prompt with "
            "another row's completion",
            "1",
            "Raise it, or take --loss_type apo_zero_unpaired.",
        )


def _training_warnings(config: RunConfig, place: Place) -> list[str]:
    warnings = []
    rate = config.optim.learning_rate
    if rate is not None and rate > HIGH_LEARNING_RATE:
        warnings.append(
            f"{place('learning_rate')}: {rate:g} is above {HIGH_LEARNING_RATE:g}, where KTO tends to break the model; "
            "5e-7 to 5e-6 is usual, with LoRA ten times that."
        )
    saving = config.checkpoint
    if saving.disable_ds_ckpt and not saving.save_hf_ckpt and (saving.save_steps > 0 or saving.save_every_minutes):
        warnings.append(f"{place('disable_ds_ckpt')}: nothing is saved before the end; --save_hf_ckpt would be.")
    is_own_reference = ref_is_adapter(config.model, has_adapter=trains_adapter(config))
    if config.deepspeed.ref_offload and is_own_reference:
        warnings.append(f"{place('ref_offload')}: has no effect, as the policy with its adapter off is the reference.")
    if config.deepspeed.ref_offload and config.model.ref_mode == "cached":
        warnings.append(f"{place('ref_offload')}: has no effect, as no reference is kept beside the policy.")
    if config.model.ref_cache_dir is not None and (is_own_reference or config.model.ref_mode == "model"):
        warnings.append(f"{place('ref_cache_dir')}: has no effect, as nothing is cached with this reference.")
    if config.train.eval_steps > 0 and not has_evaluation(config.data) and not config.samples.takes_samples:
        warnings.append(f"{place('eval_steps')}: nothing to evaluate without --eval_dataset or --eval_fraction.")
    warnings += engine_warnings(config, place)
    if config.optim.lr_scheduler not in FLOORED_SCHEDULES and config.optim.min_lr_ratio != OptimConfig().min_lr_ratio:
        warnings.append(f"{place('min_lr_ratio')}: has no effect, as {config.optim.lr_scheduler} has no floor.")
    return warnings
