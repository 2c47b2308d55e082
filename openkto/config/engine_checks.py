"""The rules between the settings of the engine: ZeRO, offload, precision, checkpointing, compilers, parallelism."""

from __future__ import annotations

import os
from collections.abc import Callable

from openkto.config import DeepspeedConfig, ModelConfig, RunConfig
from openkto.errors import fail

# Says where a setting was given: "--beta" or "run.yaml: beta".
Place = Callable[[str], str]


def check_engine(config: RunConfig, place: Place) -> None:
    """Raise a ConfigError for the first rule that is broken."""
    _check_precision(config.deepspeed, config.model.param_dtype, place)
    _check_offload(config.deepspeed, place)
    if config.deepspeed.offload_nvme_path and not config.checkpoint.disable_ds_ckpt:
        fail(
            place("offload_nvme_path"),
            "cannot be used with checkpoints: DeepSpeed does not save optimizer states that lie on a disk",
            "checkpoints",
            "Add --disable_ds_ckpt (--save_hf_ckpt still saves models), or offload to CPU memory.",
        )
    _check_communication(config.deepspeed, config.model.param_dtype, place)
    _check_recomputation(config.model, place)
    _check_compilers(config, place)
    _check_sharing(config, place)
    # What stands in the file is judged by openkto/distributed/ds_config.py, when the strategy is made.
    path = config.deepspeed.ds_config
    if path is not None and not os.path.isfile(path):
        fail(place("ds_config"), "must be a JSON file", f"{path!r}, no file", "Check the path.")


def engine_warnings(config: RunConfig, place: Place) -> list[str]:
    """Return a sentence for each setting that has no effect."""
    deepspeed, warnings = config.deepspeed, []
    if deepspeed.overlap_comm and deepspeed.zero_stage == 0:
        warnings.append(f"{place('overlap_comm')}: has no effect at --zero_stage 0.")
    if deepspeed.reduce_bucket_size is not None and deepspeed.zero_stage == 0:
        warnings.append(f"{place('reduce_bucket_size')}: has no effect at --zero_stage 0.")
    if deepspeed.allgather_bucket_size is not None and deepspeed.zero_stage < 3:
        warnings.append(
            f"{place('allgather_bucket_size')}: has no effect below --zero_stage 3, where DeepSpeed gathers all "
            "parameters in one call."
        )
    return warnings


def _check_precision(deepspeed: DeepspeedConfig, param_dtype: str | None, place: Place) -> None:
    if deepspeed.grad_accum_dtype == "bf16" and deepspeed.zero_stage == 0:
        fail(
            place("grad_accum_dtype"),
            "must be fp32 at --zero_stage 0, which keeps gradients in fp32",
            "bf16",
            "Leave it out, or take --zero_stage 1.",
        )
    if param_dtype == "fp16" and deepspeed.zero_stage == 0:
        fail(
            place("param_dtype"),
            "fp16 needs --zero_stage 1, 2 or 3, whose optimizer detects overflow",
            "--zero_stage 0",
            "Take --zero_stage 1, or bf16.",
        )
    if deepspeed.grad_accum_dtype == "bf16" and param_dtype in ("fp16", "fp32"):
        fail(place("grad_accum_dtype"), f"must be fp32 with --param_dtype {param_dtype}", "bf16", "Leave it out.")


def _check_offload(deepspeed: DeepspeedConfig, place: Place) -> None:
    if deepspeed.adam_offload and deepspeed.zero_stage == 0:
        fail(
            place("adam_offload"),
            "needs a ZeRO stage that shards the optimizer",
            "--zero_stage 0",
            "Take --zero_stage 1, 2 or 3, or leave it out.",
        )
    if deepspeed.param_offload:
        _need_stage_3("param_offload", "parameters are moved where they are sharded", deepspeed, place)
    folder = deepspeed.offload_nvme_path
    if folder is None:
        return
    _need_stage_3("offload_nvme_path", "only that stage uses a disk", deepspeed, place)
    if not deepspeed.adam_offload:
        fail(
            place("offload_nvme_path"),
            "says where --adam_offload keeps the optimizer's states",
            "no --adam_offload",
            "Add --adam_offload, or leave it out.",
        )
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        fail(
            place("offload_nvme_path"),
            "must be a folder that exists and can be written, on every node",
            repr(folder),
            "Make it, or name another.",
        )


def _check_communication(deepspeed: DeepspeedConfig, param_dtype: str | None, place: Place) -> None:
    if deepspeed.zpg > 1:
        _need_stage_3("zpg", "a second copy is of parameters that are sharded", deepspeed, place)
    if deepspeed.zero_quantized_weights:
        _need_stage_3("zero_quantized_weights", "only that stage sends parameters in every pass", deepspeed, place)
    if deepspeed.zero_quantized_gradients:
        _need_stage_3("zero_quantized_gradients", "DeepSpeed quantizes gradients only there", deepspeed, place)
        if param_dtype != "fp16":
            # all_to_all_quant_reduce hands them to kernels that take a __half*, whatever they are: bits of a bfloat16
            # or a float32 would be taken for float16's.
            fail(
                place("zero_quantized_gradients"),
                "needs --param_dtype fp16: DeepSpeed's kernels read the gradients as fp16",
                param_dtype or "none given",
                "Take fp16, or leave it out.",
            )


def _need_stage_3(name: str, why: str, deepspeed: DeepspeedConfig, place: Place) -> None:
    if deepspeed.zero_stage < 3:
        fail(
            place(name),
            f"needs --zero_stage 3: {why}",
            f"--zero_stage {deepspeed.zero_stage}",
            "Take --zero_stage 3, or leave it out.",
        )


def _check_recomputation(model: ModelConfig, place: Place) -> None:
    if not model.gradient_checkpointing_use_reentrant:
        return
    if not model.gradient_checkpointing:
        fail(
            place("gradient_checkpointing_use_reentrant"),
            "works only with --gradient_checkpointing",
            "no --gradient_checkpointing",
            "Add --gradient_checkpointing, or leave it out.",
        )
    if model.gradient_checkpointing == "selective":
        fail(
            place("gradient_checkpointing_use_reentrant"),
            "cannot choose what is recomputed",
            "--gradient_checkpointing selective",
            "Leave one of them out.",
        )


def _check_compilers(config: RunConfig, place: Place) -> None:
    model, deepspeed = config.model, config.deepspeed
    if model.torch_compile and model.gradient_checkpointing == "selective":
        fail(
            place("torch_compile"),
            "hides the matrix products inside a layer, which selective checkpointing keeps",
            "--gradient_checkpointing selective",
            "Take --gradient_checkpointing true, or leave one of them out.",
        )
    if model.torch_compile and model.gradient_checkpointing_use_reentrant:
        fail(
            place("torch_compile"),
            "works only with torch's non-reentrant checkpointing",
            "--gradient_checkpointing_use_reentrant",
            "Leave one of them out.",
        )
    if not deepspeed.deepcompile:
        return
    if model.torch_compile:
        fail(place("deepcompile"), "compiles in place of --torch_compile", "both", "Leave one of them out.")
    if deepspeed.zero_stage == 0:
        fail(
            place("deepcompile"),
            "needs a ZeRO stage, whose communication it compiles",
            "--zero_stage 0",
            "Take --zero_stage 1, 2 or 3, or --torch_compile.",
        )
    for name, is_on in (
        ("zpg", deepspeed.zpg > 1),
        ("zero_quantized_weights", deepspeed.zero_quantized_weights),
        ("zero_quantized_gradients", deepspeed.zero_quantized_gradients),
        ("offload_nvme_path", deepspeed.offload_nvme_path is not None),
    ):
        if is_on:
            fail(
                place("deepcompile"),
                "moves parameters and gradients in its own way",
                f"--{name}",
                "Leave one of them out.",
            )


def _check_sharing(config: RunConfig, place: Place) -> None:
    """Check what ranks that share weights or tokens go with: what is refused was not, or cannot be, tested."""
    model, deepspeed = config.model, config.deepspeed
    tensor, sequence = deepspeed.tensor_parallel_size, deepspeed.sequence_parallel_size
    if tensor > 1 and sequence > 1:
        fail(
            place("sequence_parallel_size"),
            "cannot be combined with --tensor_parallel_size",
            f"{sequence} and {tensor}",
            "Leave one of the two out.",
        )
    if sequence > 1 and model.packing == "off":
        fail(place("packing"), "must be on for --sequence_parallel_size, which cuts packed rows", "off", "Take auto.")
    if sequence > 1 and model.share_prompts == "on":
        rule = "must not be on with --sequence_parallel_size, which gives each GPU an equal part of whole rows"
        fail(place("share_prompts"), rule, "on", "Take auto.")
    if model.packing == "off" and model.share_prompts == "on":
        fail(place("share_prompts"), "needs packed rows", "on with --packing off", "Take auto for either.")
    if sequence > 1 and model.attn_implementation != "auto":
        got = model.attn_implementation
        fail(place("attn_implementation"), "is OpenKTO's own with --sequence_parallel_size", got, "Take auto.")
    if tensor > 1 and model.gradient_checkpointing == "selective":
        fail(
            place("gradient_checkpointing"),
            "must not be selective with --tensor_parallel_size, whose layers add up a product in place",
            "selective",
            "Take --gradient_checkpointing true.",
        )
    for name, is_given in (("load_in_4bit", config.lora.load_in_4bit), ("use_dora", config.lora.use_dora)):
        if tensor > 1 and is_given:
            fail(
                place(name),
                "cannot be combined with --tensor_parallel_size, which cuts plain weights",
                f"both, --tensor_parallel_size {tensor}",
                "Leave one of the two out.",
            )
    flag = "--tensor_parallel_size" if tensor > 1 else "--sequence_parallel_size"
    for name, is_given in (
        ("zpg", deepspeed.zpg > 1),
        ("zero_quantized_weights", deepspeed.zero_quantized_weights),
        ("zero_quantized_gradients", deepspeed.zero_quantized_gradients),
        ("deepcompile", deepspeed.deepcompile),
        ("torch_compile", model.torch_compile),
        ("use_liger_kernel", model.use_liger_kernel),
    ):
        if max(tensor, sequence) > 1 and is_given:
            rule = f"has not been tested with {flag}, and a wrong gradient would not be noticed"
            fail(place(name), rule, "both", "Leave one of the two out.")
