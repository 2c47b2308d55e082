"""The DeepSpeed configuration of a run, as a pure function of its settings, and a user's own file laid over it.

Source: what was measured of DeepSpeed 0.19.8; a comment says why wherever its default would be wrong.
"""

import json
from pathlib import Path
from typing import Any, Literal

from deepspeed.runtime.config import DeepSpeedConfig
from pydantic import ValidationError

from openkto.distributed.zero_options import SIZE_FLAGS, ZeroOptions, in_cpu_memory, shared_section, zero_section
from openkto.errors import ConfigError
from openkto.process.limits import check_plain

Precision = Literal["fp32", "bf16", "fp16"]
SMALLEST_LOSS_SCALE = 1.0  # of fp16
OFF = {"enabled": False}

# What the run decides: by which flag, and the value that agrees where the computed configuration lacks the key. A
# user's file may repeat it, not contradict it.
OWNED: dict[str, tuple[str, Any]] = {
    "train_batch_size": ("--train_batch_size", None),
    "train_micro_batch_size_per_gpu": ("--micro_train_batch_size", None),
    "gradient_accumulation_steps": ("--train_batch_size and --micro_train_batch_size", 1),
    "managed_gradient_accumulation": ("OpenKTO", None),
    "gradient_clipping": ("--max_norm", None),
    "optimizer": ("--learning_rate, --adam_betas and --l2", {}),
    "scheduler": ("--lr_scheduler", {}),
    "torch_autocast": ("--param_dtype and --zero_stage", OFF),
    "amp": ("--param_dtype", OFF),
    "bf16.enabled": ("--param_dtype", False),
    "bf16.immediate_grad_update": ("OpenKTO", False),
    "bf16.check_grad_overflow": ("OpenKTO", True),
    "bf16.bf16_master_weights_and_grads": ("OpenKTO", False),
    "bf16.bf16_optimizer_states": ("OpenKTO", False),
    "fp16.enabled": ("--param_dtype", False),
    "fp16.auto_cast": ("OpenKTO", False),
    "fp16.loss_scale": ("OpenKTO", 0),
    "fp16.min_loss_scale": ("OpenKTO", SMALLEST_LOSS_SCALE),
    "fp16.fp16_master_weights_and_grads": ("OpenKTO", False),
    "data_types.grad_accum_dtype": ("--grad_accum_dtype", None),
    "data_types.param_dtype": ("--param_dtype", None),
    "data_types.buffer_dtype": ("--param_dtype", None),
    "communication_data_type": ("--grad_accum_dtype", None),
    "zero_optimization.stage": ("--zero_stage", None),
    "zero_optimization.overlap_comm": ("--overlap_comm", False),
    "zero_optimization.offload_optimizer.device": ("--adam_offload and --offload_nvme_path", "none"),
    "zero_optimization.offload_optimizer.nvme_path": ("--offload_nvme_path", None),
    "zero_optimization.offload_optimizer.super_offload": ("OpenKTO", False),
    "zero_optimization.cpu_offload": ("--adam_offload", False),
    "zero_optimization.cpu_offload_param": ("--param_offload", False),
    "zero_optimization.cpu_offload_use_pin_memory": ("OpenKTO", False),
    "zero_optimization.compute_grad_norm": ("OpenKTO", True),
    "zero_optimization.legacy_stage1": ("OpenKTO", False),
    "zero_optimization.elastic_checkpoint": ("OpenKTO", False),
    "zero_optimization.zenflow": ("OpenKTO", None),
    "zero_optimization.offload_param.device": ("--param_offload", "none"),
    "zero_optimization.zero_hpz_partition_size": ("--zpg", 1),
    "zero_optimization.zero_quantized_weights": ("--zero_quantized_weights", False),
    "zero_optimization.zero_quantized_nontrainable_weights": ("OpenKTO", False),
    "zero_optimization.zero_quantized_gradients": ("--zero_quantized_gradients", False),
    "zero_allow_untested_optimizer": ("OpenKTO", True),
    "zero_force_ds_cpu_optimizer": ("OpenKTO", False),
    "checkpoint.load_universal": ("OpenKTO", False),
    "compile.deepcompile": ("--deepcompile", False),
    "prescale_gradients": ("OpenKTO", False),
    "gradient_predivide_factor": ("OpenKTO", 1),
    "sparse_gradients": ("OpenKTO", False),
    "data_efficiency": ("OpenKTO", OFF),
    "curriculum_learning": ("OpenKTO", OFF),
    "elasticity": ("OpenKTO", OFF),
    "hybrid_engine": ("OpenKTO", OFF),
    "autotuning": ("OpenKTO", OFF),
    "sequence_parallel_size": ("--sequence_parallel_size", 1),
    "tensor_parallel": ("--tensor_parallel_size", {}),
    "pipeline": ("OpenKTO", {}),
    "compression_training": ("OpenKTO", {}),
}
# The other top-level keys with their types. DeepSpeed takes unknown keys, and a wrong type of some, in silence.
FREE: dict[str, type] = {
    **dict.fromkeys(("activation_checkpointing", "aio", "comet", "comms_logger", "csv_monitor"), dict),
    **dict.fromkeys(("flops_profiler", "tensorboard", "timers", "wandb"), dict),
    **dict.fromkeys(("dump_state", "memory_breakdown", "wall_clock_breakdown"), bool),
    "steps_per_print": int,
}
TYPE_NAMES = {dict: "an object", bool: "true or false", int: "a whole number"}


def deepspeed_config(
    *,
    zero_stage: int,
    precision: Precision,
    micro_batch_size: int,
    max_norm: float,
    grad_accum_dtype: Literal["fp32", "bf16"] = "fp32",
    options: ZeroOptions | None = None,
    tensor_parallel_size: int = 1,
) -> dict[str, Any]:
    """Return the configuration for training with an optimizer of our own.

    Gradient accumulation stays 1: the trainer sets each boundary itself, so that steps may differ in their number of
    micro-batches.

    Raises:
        ConfigError: float16 at stage 0, which scales no loss there.
    """
    if precision == "fp16" and zero_stage == 0:
        raise ConfigError("--param_dtype: fp16 needs a ZeRO stage; got --zero_stage 0. Take --zero_stage 1, or bf16.")
    options = options or ZeroOptions()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        # Always written: left out, DeepSpeed clips at 1.0; 0 means off.
        "gradient_clipping": max_norm,
        "steps_per_print": 10**9,
        "zero_optimization": zero_section(zero_stage, options),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **_tensor_parallel(tensor_parallel_size),
    }
    if options.deepcompile:
        config["compile"] = {"deepcompile": True}
    if precision == "bf16" and zero_stage == 0:
        # DeepSpeed's own bf16 at stage 0 cannot accumulate in float32; this keeps float32 parameters.
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif precision == "bf16":
        config["bf16"] = {"enabled": True}
        # Both are needed: accumulating or reducing in bfloat16 loses 0.7% of the gradient.
        config["data_types"] = {"grad_accum_dtype": grad_accum_dtype}
        config["communication_data_type"] = grad_accum_dtype
    elif precision == "fp16":
        config["fp16"] = {
            "enabled": True,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "min_loss_scale": SMALLEST_LOSS_SCALE,
        }
    return config


def _tensor_parallel(size: int) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": size}} if size > 1 else {}


def frozen_config(
    *,
    zero_stage: int,
    precision: Precision,
    micro_batch_size: int,
    offload: bool,
    options: ZeroOptions | None = None,
    tensor_parallel_size: int = 1,
) -> dict[str, Any]:
    """Return the configuration of a reference model that is sharded by ZeRO-3, as the policy is."""
    zero: dict[str, Any] = {"stage": zero_stage, **shared_section(options or ZeroOptions())}
    if offload:
        zero["offload_param"] = in_cpu_memory()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        **_tensor_parallel(tensor_parallel_size),
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return config


def merge_user_config(
    computed: dict[str, Any], path: str, train_batch_size: int | None = None, sequence_parallel_size: int = 1
) -> dict[str, Any]:
    """Lay a user's DeepSpeed JSON over the computed configuration; needs no process group.

    `"auto"` means the computed value, as in transformers.

    Args:
        computed: what `deepspeed_config` returned.
        path: the file.
        train_batch_size: of the run, which the file may repeat. It is not handed on: DeepSpeed would hold it against
            its own accumulation of 1.
        sequence_parallel_size: likewise: DeepSpeed is not told that ranks share tokens.

    Raises:
        ConfigError: the file is not a JSON object, holds an unknown key or a value that DeepSpeed refuses, or
            contradicts what the run decides.
    """
    user = _read(path)
    given = {key: flag for key, flag in SIZE_FLAGS.items() if key.partition(".")[2] in computed["zero_optimization"]}
    owned = OWNED | {key: (flag, None) for key, flag in given.items()}
    owned = owned | {
        "train_batch_size": ("--train_batch_size", train_batch_size),
        "sequence_parallel_size": ("--sequence_parallel_size", sequence_parallel_size),
    }
    for key, value in user.items():
        if key not in FREE and not any(name.split(".")[0] == key for name in owned):
            raise _wrong(path, key, "must be a key of DeepSpeed's that has a use here", value, "Remove it.")
        if key in FREE and value != "auto" and type(value) is not FREE[key]:
            raise _wrong(path, key, f"must be {TYPE_NAMES[FREE[key]]}", value, "Correct it.")
    merged = _merge(computed, user, owned, path, "")
    for key in user:
        if key in merged:
            _check_by_deepspeed(computed | {key: merged[key]}, key, path)
    return merged


def flat_config(config: dict[str, Any], prefix: str = "DeepSpeed's ") -> dict[str, Any]:
    """Return each setting under its dotted name, as an error gives it."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flat_config(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _read(path: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigError(
                f"--ds_config {path}: a key may be given only once; got {json.dumps(twice[0])} twice. Keep one of the "
                "two."
            )
        return dict(pairs)

    try:
        check_plain("--ds_config", path)
        user = json.loads(Path(path).read_text(encoding="utf-8-sig"), object_pairs_hook=unique)
    except OSError as error:
        got = f"{path!r} ({error.strerror})"
        raise ConfigError(f"--ds_config: must be a JSON file; got {got}. Check the path.") from None
    except json.JSONDecodeError as error:
        place = f"--ds_config {path}:{error.lineno}"
        raise ConfigError(f"{place}: must be JSON; got an error there: {error.msg}. Correct it.") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"--ds_config {path}: must be JSON; got text that JSON cannot hold. Correct it.") from None
    if not isinstance(user, dict):
        got = type(user).__name__
        raise ConfigError(f"--ds_config {path}: must be a JSON object; got {got}. Write {{...}} around its keys.")
    return user


def _merge(
    computed: dict[str, Any], user: dict[str, Any], owned: dict[str, tuple[str, Any]], path: str, prefix: str
) -> dict[str, Any]:
    merged = dict(computed)
    for key, value in user.items():
        name = prefix + key
        if value == "auto":
            continue
        if name in owned:
            decider, otherwise = owned[name]
            decided = computed.get(key, otherwise)
            if value != decided:
                said = "" if decided in (None, {}) else f" ({json.dumps(decided)})"
                raise _wrong(path, name, f"is decided by {decider}{said}", value, "Take the key out of the file.")
            continue
        is_section = isinstance(computed.get(key), dict) or any(other.startswith(f"{name}.") for other in owned)
        if is_section and not isinstance(value, dict):
            raise _wrong(path, name, "must be an object", value, "Correct it, or take it out of the file.")
        if prefix == "data_types.":
            raise _wrong(path, name, "must be a key of DeepSpeed's that has a use here", value, "Remove it.")
        if isinstance(value, dict) and value:
            base = computed.get(key)
            value = _merge(base if isinstance(base, dict) else {}, value, owned, path, f"{name}.")
            if not value:  # everything in it agreed
                continue
        merged[key] = value
    return merged


def _check_by_deepspeed(config: dict[str, Any], key: str, path: str) -> None:
    """Let DeepSpeed read one key together with the computed ones, and say in a sentence what it refuses there."""
    try:
        DeepSpeedConfig(config)
    except ValidationError as error:
        first = error.errors()[0]
        parts = [str(part) for part in first["loc"]]
        name = ".".join(parts if parts[:1] == [key] else [key, *parts])
        if first["type"] == "extra_forbidden":
            raise _wrong(path, name, "must be a key of DeepSpeed's", first["input"], "Remove it.") from None
        rule = f"must be what DeepSpeed takes ({first['msg']})"
        raise _wrong(path, name, rule, first["input"], "Correct it.") from None
    except Exception as error:  # it raises whatever a wrong type leads to
        reason = " ".join(str(error).split())[:120]
        raise _wrong(path, key, f"must be what DeepSpeed takes ({reason})", config[key], "Correct it.") from None


def _wrong(path: str, name: str, rule: str, got: Any, cure: str) -> ConfigError:
    text = json.dumps(got, default=str)
    text = text if len(text) <= 80 else f"{text[:76]} ..."
    return ConfigError(f"--ds_config {path}: {name}: {rule}; got {text}. {cure}")
