"""The DeepSpeed configuration of a run, as a pure function of its settings, and a user's own file laid over it.

Source: what was measured of DeepSpeed 0.19.8; a comment says why wherever its default would be wrong.
"""

import json
from pathlib import Path
from typing import Any, Literal

from openkto.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]
SMALLEST_LOSS_SCALE = 1.0  # of fp16

# What the run decides, with the flag that does; a user's file may repeat it, not contradict it.
OWNED = {
    "train_batch_size": "--train_batch_size",
    "train_micro_batch_size_per_gpu": "--micro_train_batch_size",
    "gradient_accumulation_steps": "--train_batch_size and --micro_train_batch_size",
    "managed_gradient_accumulation": "OpenKTO",
    "gradient_clipping": "--max_norm",
    "optimizer": "--learning_rate, --adam_betas and --l2",
    "scheduler": "--lr_scheduler",
    "bf16.enabled": "--param_dtype",
    "fp16.enabled": "--param_dtype",
    "torch_autocast": "--param_dtype and --zero_stage",
    "amp": "--param_dtype",
    "data_types.grad_accum_dtype": "--grad_accum_dtype",
    "communication_data_type": "--grad_accum_dtype",
    "zero_optimization.stage": "--zero_stage",
    "zero_optimization.overlap_comm": "--overlap_comm",
    "zero_optimization.offload_optimizer.device": "--adam_offload",
    "prescale_gradients": "OpenKTO",
    "gradient_predivide_factor": "OpenKTO",
    "data_efficiency": "OpenKTO",
    "curriculum_learning": "OpenKTO",
    "sequence_parallel_size": "OpenKTO",
    "tensor_parallel": "OpenKTO",
    "pipeline": "OpenKTO",
    "compression_training": "OpenKTO",
}
# DeepSpeed takes any other top-level key in silence, so a misspelt one would do nothing.
FREE = (
    "activation_checkpointing", "aio", "autotuning", "checkpoint", "comms_logger", "compile", "csv_monitor",
    "disable_allgather", "dump_state", "elasticity", "flops_profiler", "memory_breakdown", "sparse_gradients",
    "steps_per_print", "tensorboard", "timers", "wall_clock_breakdown", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization", "bf16", "fp16", "data_types", "wandb", "hybrid_engine",
    "nebula", "use_data_before_expert_parallelism", "seq_parallel_communication_data_type", "graph_harvesting",
)  # fmt: skip


def deepspeed_config(
    *,
    zero_stage: int,
    precision: Precision,
    micro_batch_size: int,
    max_norm: float,
    grad_accum_dtype: Literal["fp32", "bf16"] = "fp32",
    adam_offload: bool = False,
    overlap_comm: bool = False,
) -> dict[str, Any]:
    """Return the configuration for training with an optimizer of our own.

    Gradient accumulation stays 1: the trainer sets each boundary itself, so that steps may differ in their number of
    micro-batches.
    """
    zero: dict[str, Any] = {"stage": zero_stage, "overlap_comm": overlap_comm}
    if adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        # Always written: left out, DeepSpeed clips at 1.0; 0 means off.
        "gradient_clipping": max_norm,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
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


def frozen_config(*, zero_stage: int, precision: Precision, micro_batch_size: int, offload: bool) -> dict[str, Any]:
    """Return the configuration of a reference model that is sharded by ZeRO-3."""
    zero: dict[str, Any] = {"stage": zero_stage}
    if offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return config


def merge_user_config(computed: dict[str, Any], path: str) -> dict[str, Any]:
    """Lay a user's DeepSpeed JSON over the computed configuration.

    `"auto"` means the computed value, as in transformers.

    Raises:
        ConfigError: the file is no JSON object, holds an unknown key, or contradicts what a flag of the run decides.
    """
    try:
        user = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--ds_config {path}: must be a JSON file; {error}.") from error
    if not isinstance(user, dict):
        raise ConfigError(f"--ds_config {path}: must hold one JSON object; got {type(user).__name__}.")
    for key in user:
        if key not in FREE and key not in {owned.split(".")[0] for owned in OWNED}:
            raise ConfigError(f"--ds_config {path}: {key}: no such key in DeepSpeed's configuration. Remove it.")
    return _merge(computed, user, path, "")


def _merge(computed: dict[str, Any], user: dict[str, Any], path: str, prefix: str) -> dict[str, Any]:
    merged = dict(computed)
    for key, value in user.items():
        name = prefix + key
        if value == "auto":
            continue
        if name in OWNED and value != computed.get(key):
            decided = f"by {OWNED[name]}" + (f" ({json.dumps(computed[key])})" if key in computed else "")
            raise ConfigError(
                f"--ds_config {path}: {name}: is decided {decided}; got {json.dumps(value)}. "
                "Take the key out of the file."
            )
        if isinstance(value, dict):
            base = computed.get(key, {})
            merged[key] = _merge(base if isinstance(base, dict) else {}, value, path, name + ".")
        else:
            merged[key] = value
    return merged
