"""What a run is: one frozen section per part of the program, each setting with its meaning, unit, default and range.

A setting's name is its flag (`--beta`) and its key in YAML (`beta`): names are unique over all sections. A part of the
program gets its own section or plain values, never the whole. `openkto/flags.py` reads them from the command line and
YAML, `openkto/checks.py` holds the rules between settings. None of the three imports torch or transformers, so that
`--help` answers at once.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

# The schedules of transformers' SchedulerType that are functions of the step; the first end at min_lr_ratio.
FLOORED_SCHEDULES = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "polynomial", "warmup_stable_decay")
LR_SCHEDULERS = (
    *(*FLOORED_SCHEDULES, "linear", "cosine", "cosine_with_restarts"),
    *("constant", "constant_with_warmup", "inverse_sqrt"),
)
METRIC_SCHEDULERS = ("reduce_lr_on_plateau", "greedy")
PackingChoice = Literal["auto", "on", "off"]
PACKING: tuple[PackingChoice, ...] = ("auto", "on", "off")
ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
DTYPES = ("bf16", "fp16", "fp32")
# What --keep_best may follow, and which way is better.
HIGHER_IS_BETTER = {
    **dict.fromkeys(("rewards/auc", "rewards/accuracy", "rewards/margins", "rewards/chosen"), True),
    **dict.fromkeys(("loss", "rewards/rejected"), False),
}
LOSS_TYPES = ("kto", "apo_zero_unpaired", "kto_length_normalized", "bco", "kto_humanline")
# Those whose reference point comes from mismatched pairs.
LOSSES_WITH_Z_REF = ("kto", "kto_length_normalized", "kto_humanline")
REF_MODES = ("auto", "model", "adapter", "cached")
# Losses that ask the reference for the log-probability of each token: a cache has those of whole completions alone.
TOKEN_LOSSES = ("kto_humanline",)
DEFAULT_LEARNING_RATE = 1e-6
DEFAULT_LORA_LEARNING_RATE = 1e-5
ALL_LINEAR = "all-linear"
# What the tokenizer's apply_chat_template takes itself, so that --chat_template_kwargs may not set it.
TEMPLATE_ARGUMENTS = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now"),
    )
)
LARGE = 2**31  # a count beyond it is a slip of the hand


@dataclass(frozen=True)
class Option:
    """What is known of a setting beside its type and default."""

    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None
    is_path: bool = False
    is_duration: bool = False
    default_text: str = ""  # says what an absent value means
    openrlhf: str = ""  # OpenRLHF's default, where ours differs


def option(default: Any, help: str, unit: str = "", **known: Any) -> Any:
    """Return a dataclass field with its `Option`; a list stands for a fresh copy of itself."""
    metadata = {"option": Option(help, unit, **known)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    pretrain: str = option(
        dataclasses.MISSING,
        "the policy to start from: a Hugging Face name, a folder, or a LoRA adapter's folder, which is trained further",
        is_path=True,
    )
    ref_pretrain: str | None = option(
        None, "the frozen reference, likewise", default_text="what training starts from", is_path=True
    )
    revision: str | None = option(
        None,
        "the branch, tag or commit of --pretrain, a model on the Hub; owner/name@revision says the same",
        default_text="the newest",
    )
    ref_revision: str | None = option(
        None, "likewise, of the reference", default_text="the newest; that of --pretrain where the model is the same"
    )
    ref_mode: str = option(
        "auto",
        "the reference is a model of its own, the policy with its LoRA adapter off or as it started, or a cache of the "
        "model's log-probabilities, filled before training; auto is adapter where the policy has one and "
        "--ref_pretrain names no other model, else cached where the cache holds all of the run, else model",
        choices=REF_MODES,
    )
    ref_sync_steps: int = option(
        0,
        "move the reference towards the policy every so many (TR-DPO); 0 is never",
        "steps",
        at_least=0,
        below=LARGE,
    )
    ref_sync_alpha: float = option(
        0.6, "how far: 1 makes the reference the policy", "share of the way", above=0, at_most=1
    )
    ref_cache_dir: str | None = option(
        None,
        "where the reference's log-probabilities are kept, shared by all nodes",
        default_text="ref in $OPENKTO_CACHE or ~/.cache/openkto",
        is_path=True,
    )
    use_ms: bool = option(False, "load models from ModelScope instead of the Hugging Face Hub; needs its package")
    trust_remote_code: bool = option(False, "run Python code that comes with a model or tokenizer")
    disable_fast_tokenizer: bool = option(False, "use the tokenizer's slow implementation")
    attn_implementation: str = option(
        "auto", "attention kernel; auto is the best that is installed", choices=ATTENTION, openrlhf="flash_attention_2"
    )
    packing: str = option(
        "auto",
        "lay the rows of a micro-batch end to end, without padding; auto does where the model's attention can",
        choices=PACKING,
    )
    param_dtype: str | None = option(
        None,
        "the dtype that the model computes in; the optimizer's copy is always fp32",
        choices=DTYPES,
        default_text="bf16 on a GPU, fp32 on a CPU",
        openrlhf="bf16",
    )
    export_dtype: str | None = option(
        None,
        "the dtype of the saved model or adapter",
        choices=DTYPES,
        default_text="the same as --param_dtype; merged, the base model's",
    )
    gradient_checkpointing: bool | str = option(
        False,
        "recompute activations in the backward pass: all of them, or, selective, all but the results of matrix "
        "products and attention: less memory, slower",
        choices=("true", "false", "selective"),
    )
    gradient_checkpointing_use_reentrant: bool = option(False, "use torch's reentrant form of gradient checkpointing")
    use_liger_kernel: bool = option(
        False, "take the Liger package's fused norms, rotary positions and SwiGLU in known models; needs a GPU"
    )
    torch_compile: bool = option(
        False,
        "compile the model's layers, and the head's passes over logits, with torch.compile: a slow start, faster steps",
    )


@dataclass(frozen=True)
class LoraConfig:
    lora_rank: int = option(0, "rank of the LoRA adapter to train; 0 trains all parameters", at_least=0, below=LARGE)
    lora_alpha: int = option(16, "the adapter is scaled by alpha / rank", at_least=1, below=LARGE)
    target_modules: list[str] = option(  # noqa: RUF009 (a plain field)
        [ALL_LINEAR],
        "the modules to adapt, by the ends of their names; all-linear is every linear one, experts too, but the head "
        "and routers",
        default_text=ALL_LINEAR,
    )
    lora_dropout: float = option(
        0.0, "dropout in the adapter, only in the forwards that train", "probability", at_least=0, below=1
    )
    use_rslora: bool = option(False, "scale the adapter by alpha / sqrt(rank) (rsLoRA)")
    use_dora: bool = option(False, "also train the length of each output's weight vector (DoRA)")
    lora_modules_to_save: list[str] = option(  # noqa: RUF009 (a plain field)
        [], "modules to train whole and to save with the adapter, by the ends of their names", default_text="none"
    )
    target_parameters: list[str] = option(  # noqa: RUF009 (a plain field)
        [],
        "the experts' weights to adapt, by the ends of their names, such as mlp.experts.gate_up_proj, and no others",
        default_text="those that --target_modules names",
    )
    load_in_4bit: bool = option(False, "keep the frozen weights in 4 bits (QLoRA); needs a GPU and bitsandbytes")


@dataclass(frozen=True)
class DataConfig:
    dataset: list[str] = option(  # noqa: RUF009 (a plain field)
        [],
        "training rows: Hub names, files, globs or folders, by spaces or commas; in YAML an entry may be a mapping of "
        "path and split, config, revision, input_key, output_key, label_key or weight_key of its own",
        is_path=True,
        default_text="required to train",
    )
    dataset_probs: list[float] | None = option(  # noqa: RUF009 (a plain field)
        None,
        "mixing probabilities, one a dataset, by spaces or commas; they sum to 1",
        above=0,
        default_text="all rows of each",
    )
    eval_dataset: list[str] = option(  # noqa: RUF009 (a plain field)
        [], "evaluation sets, each PATH or NAME=PATH; a set is named after its file otherwise", default_text="none"
    )
    dataset_split: str = option("train", "the split of --dataset")
    dataset_config: str | None = option(
        None,
        "the subset of datasets on the Hub that have several; NAME:SUBSET names it for one",
        default_text="its own",
    )
    dataset_revision: str | None = option(
        None, "the commit, tag or branch of datasets on the Hub", default_text="the newest"
    )
    eval_split: str = option("test", "the split of --eval_dataset")
    max_samples: int = option(1000000, "use the first rows of each source, at most", "rows", at_least=1, below=LARGE)
    input_key: str | None = option(
        None, "the field with the prompt", default_text="recognised from the row", openrlhf="input"
    )
    output_key: str | None = option(None, "the field with the completion", default_text="recognised from the row")
    label_key: str = option(
        "label",
        "the field with the label: true is desirable. A path with dots, as scores.0.value, goes into nested fields, "
        "as those of --input_key and --output_key do; in a dialogue it may name a field of the messages",
    )
    label_map: list[str] = option(  # noqa: RUF009 (a plain field)
        [],
        "what labels mean, as VALUE=true, VALUE=false, or VALUE=none to leave such rows out; no other value is taken "
        "then",
        default_text="true/false, 1/0, 1/-1 and usual words",
    )
    label_threshold: list[float] | None = option(  # noqa: RUF009 (a plain field)
        None,
        "reads scores as labels: of one number, desirable from it and undesirable below it; of two, desirable from the "
        "larger, undesirable up to the smaller, and what is between is left out and counted",
        default_text="labels are no scores",
    )
    weight_key: str | None = option(
        None, "the field with a row's own weight, a number of at least 0", default_text="every row weighs 1"
    )
    input_template: str | None = option(
        None,
        "wraps text prompts; {} stands for the prompt",
        default_text="text prompts as they are",
        openrlhf="'User: {}\\nAssistant: '",
    )
    apply_chat_template: bool | None = option(
        None,
        "wrap text prompts in the chat template too, as message lists always are",
        default_text="on where the tokenizer has a template, unless --input_template is given",
        openrlhf="off",
    )
    chat_template_kwargs: str | None = option(
        None,
        "arguments for the chat template, a JSON object such as '{\"enable_thinking\": false}'; a row's own field "
        "chat_template_kwargs goes over them",
        default_text="none",
    )
    template_date: str | None = option(
        None,
        "the day, YYYY-MM-DD, that a chat template which prints today's date prints in every row",
        default_text="the day on which the run first started",
    )
    max_len: int = option(2048, "longest prompt and completion together", "tokens", at_least=3, below=LARGE)
    truncation: str = option(
        "completion",
        "a row over --max_len: cut the completion's end, cut the prompt's start, or drop the row",
        choices=("completion", "prompt", "drop"),
    )
    on_bad_rows: str = option("error", "stop at a bad row, or skip and count it", choices=("error", "skip"))
    data_cache_dir: str | None = option(
        None, "where tokenised rows are kept", default_text="$OPENKTO_CACHE or ~/.cache/openkto", is_path=True
    )


@dataclass(frozen=True)
class LossConfig:
    loss_type: str = option("kto", "the objective; docs/losses.md says when to use which", choices=LOSS_TYPES)
    beta: float = option(
        0.1, "how strongly the policy is held to the reference; larger is closer", above=0, openrlhf="0.01"
    )
    desirable_loss_weight: float | str = option(
        1.0, "weight of desirable rows; auto raises the smaller class until both weigh the same", at_least=0
    )
    undesirable_loss_weight: float | str = option(
        1.0, "weight of undesirable rows; auto raises the smaller class until both weigh the same", at_least=0
    )
    label_smoothing: float = option(
        0.0, "the probability with which a label is taken to be wrong", at_least=0, below=0.5
    )
    sft_loss_coef: float = option(
        0.0, "weight of the negative log-likelihood of the desirable rows' completion tokens", at_least=0
    )
    humanline_low: float = option(
        -1.0, "kto_humanline: a token's log-ratio is clamped to at least this", "nats", at_least=-100, below=0
    )
    humanline_high: float = option(
        1.5, "kto_humanline: a token's log-ratio is clamped to at most this", "nats", above=0, below=100
    )
    aux_loss_coef: float = option(0.0, "weight of the balancing loss of mixture-of-experts models", at_least=0)


@dataclass(frozen=True)
class OptimConfig:
    learning_rate: float | None = option(
        None,
        "the highest learning rate of the schedule",
        above=0,
        below=10,
        default_text="1e-6, with LoRA 1e-5",
        openrlhf="1e-5",
    )
    lr_scheduler: str = option(
        "cosine_with_min_lr",
        "the schedule, by its name in transformers; linear, cosine and cosine_with_restarts end in a step at rate 0",
        choices=LR_SCHEDULERS,
    )
    lr_warmup_ratio: float = option(
        0.03, "warm-up, in which the learning rate rises from 0", "share of all steps", at_least=0, below=1
    )
    min_lr_ratio: float = option(
        0.1, "the floor of schedules that have one", "share of --learning_rate", at_least=0, below=1
    )
    l2: float = option(0.0, "weight decay; norms and biases have none", at_least=0)
    adam_betas: tuple[float, float] = option((0.9, 0.95), "Adam's two averaging factors", at_least=0, below=1)
    max_norm: float = option(1.0, "clip the global gradient norm to this; 0 is no clipping", at_least=0)


@dataclass(frozen=True)
class DeepspeedConfig:
    zero_stage: int = option(
        2, "ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters", at_least=0, below=4
    )
    zpg: int = option(
        1,
        "ZeRO++: ranks that hold a whole copy of the parameters between them for the backward pass, such as the GPUs "
        "of a node; 1 is off; --zero_stage 3",
        "ranks",
        at_least=1,
        below=LARGE,
    )
    zero_quantized_weights: bool = option(
        False, "ZeRO++: send parameters in 8 bits, which rounds them; --zero_stage 3, a GPU"
    )
    zero_quantized_gradients: bool = option(
        False, "ZeRO++: send gradients between nodes in 4 bits, which rounds them; --zero_stage 3, fp16, a GPU"
    )
    ref_offload: bool = option(False, "keep the reference's parameters in CPU memory")
    adam_offload: bool = option(
        False, "keep the optimizer's states in CPU memory, and update there, with DeepSpeed's CPU Adam beside a GPU"
    )
    param_offload: bool = option(False, "keep the policy's parameters in CPU memory; --zero_stage 3")
    offload_nvme_path: str | None = option(
        None,
        "a folder on a local NVMe disk where --adam_offload keeps the states instead; --zero_stage 3, no checkpoints",
        is_path=True,
        default_text="CPU memory",
    )
    reduce_bucket_size: int | None = option(
        None,
        "reduce so many gradients at a time: a buffer of that size",
        "elements",
        at_least=1,
        below=LARGE,
        default_text="5e7, or all that train if fewer",
    )
    allgather_bucket_size: int | None = option(
        None,
        "at --zero_stage 3 gather so many parameters ahead of their use",
        "elements",
        at_least=1,
        below=LARGE,
        default_text="5e7",
    )
    grad_accum_dtype: str | None = option(
        None,
        "the dtype in which gradients add up",
        choices=("fp32", "bf16"),
        default_text="fp32: bf16 loses 0.7% of the gradient",
        openrlhf="the model's own",
    )
    overlap_comm: bool = option(False, "reduce gradients during the backward pass")
    deepcompile: bool = option(
        False, "let DeepSpeed compile the policy, communication included; needs a GPU and --zero_stage 1, 2 or 3"
    )
    tensor_parallel_size: int = option(
        1,
        "so many GPUs share the weights of a model, by DeepSpeed's AutoTP, and run the same rows; it must divide the "
        "number of GPUs",
        "GPUs",
        at_least=1,
        below=LARGE,
    )
    sequence_parallel_size: int = option(
        1,
        "so many GPUs share the tokens of a micro-batch, by DeepSpeed's Ulysses; it must divide the number of GPUs",
        "GPUs",
        at_least=1,
        below=LARGE,
    )
    ds_config: str | None = option(
        None, "a DeepSpeed JSON file laid over the computed configuration", default_text="none", is_path=True
    )
    local_rank: int = option(-1, "set by the launcher", at_least=-1, below=LARGE)


@dataclass(frozen=True)
class TrainConfig:
    train_batch_size: int = option(
        128, "the global batch: one optimizer step over all GPUs", "rows", at_least=1, below=LARGE
    )
    micro_train_batch_size: int | None = option(
        None,
        "at most so many in a forward pass with gradient on one GPU; changes only speed, never results",
        "rows",
        at_least=1,
        below=LARGE,
        default_text="8, or no limit beside --max_tokens_per_micro_batch",
    )
    max_tokens_per_micro_batch: int | str | None = option(
        None,
        "at most so many in a forward pass with gradient on one GPU, those of padding included where there is any; "
        "auto measures what fits; changes only speed and memory, never results",
        "tokens",
        at_least=1,
        below=LARGE,
        default_text="no limit",
    )
    max_epochs: int = option(1, "times over the training rows", "epochs", at_least=1, below=LARGE)
    max_steps: int | None = option(
        None, "length of the run, schedule included", "steps", at_least=1, below=LARGE, default_text="from --max_epochs"
    )
    stop_after_steps: int | None = option(
        None, "stop early, with the schedule as it was", "steps", at_least=1, below=LARGE, default_text="never"
    )
    seed: int = option(42, "seed of the order of rows", at_least=0, below=2**32)
    full_determinism: bool = option(False, "only deterministic kernels: bit-identical reruns, slower")
    logging_steps: int = option(1, "log every so many, pooled over them", "steps", at_least=1, below=LARGE)
    eval_steps: int = option(-1, "evaluate every so many; -1 once an epoch, 0 never", "steps", at_least=-1, below=LARGE)
    eval_at_start: bool = option(False, "also evaluate before the first step")
    log_batches: bool = option(False, "write each step's row numbers to batches.jsonl")
    log_entropy: bool = option(False, "log the entropy of the policy's next-token distribution")


@dataclass(frozen=True)
class OutputConfig:
    save_path: str = option("./ckpt", "folder of the trained model, run.yaml and metrics.jsonl", is_path=True)
    use_tensorboard: str | None = option(
        None,
        "folder of TensorBoard's files; none turns it off",
        default_text="<save_path>/tensorboard",
        is_path=True,
        openrlhf="off",
    )
    use_wandb: bool = option(False, "log to W&B; the key comes from WANDB_API_KEY or `wandb login`, never from here")
    wandb_org: str | None = option(None, "W&B entity", default_text="your own")
    wandb_group: str | None = option(None, "W&B group", default_text="none")
    wandb_project: str = option("openkto", "W&B project", openrlhf="openrlhf_train_dpo")
    wandb_run_name: str | None = option(None, "W&B run name", default_text="kto_<date>", openrlhf="rm_<date>")


@dataclass(frozen=True)
class CheckpointConfig:
    ckpt_path: str | None = option(
        None,
        "folder of the checkpoints, shared by all nodes",
        default_text="<save_path>/checkpoints",
        is_path=True,
        openrlhf="./ckpt/checkpoints_kto",
    )
    save_steps: int = option(
        -1,
        "save a checkpoint every so many, and at the end; -1 once an epoch, 0 only when the run is stopped early",
        "steps",
        at_least=-1,
        below=LARGE,
        default_text="-1: once an epoch",
        openrlhf="-1: never",
    )
    save_every_minutes: float | None = option(
        None, "also save one when so long has passed since the last", "minutes", above=0, default_text="off"
    )
    max_ckpt_num: int = option(
        3, "keep so many checkpoints; the oldest goes when a new one is complete", at_least=1, below=LARGE
    )
    max_ckpt_mem: float = option(1e8, "keep checkpoints of so much in all, the newest in any case", "GB", above=0)
    keep_best: str | None = option(
        None,
        "a metric of the first evaluation set, such as rewards/auc; its best step is saved and never deleted",
        choices=tuple(HIGHER_IS_BETTER),
        default_text="off",
    )
    save_hf_ckpt: bool = option(False, "with each checkpoint also save the model as a Hugging Face folder")
    disable_ds_ckpt: bool = option(False, "write no DeepSpeed checkpoints; a run cannot be resumed then")
    save_failed_step: bool = option(
        False, "save a checkpoint of the state before a step that gives NaN, so that the step can be made again"
    )
    load_checkpoint: bool | str = option(
        False,
        "resume from the newest complete checkpoint, or start anew where there is none; a path (a checkpoint, a run's "
        "folder, .../best) demands that one",
        is_path=True,
    )
    overwrite: bool = option(
        False,
        "start anew where --save_path holds another model or run: the model is replaced when the new one is complete, "
        "checkpoints and records are kept under a number",
    )
    use_ds_universal_ckpt: bool = option(
        False, "accepted for OpenRLHF's sake: any checkpoint is resumed on any number of ranks and any ZeRO stage"
    )
    max_time: str | None = option(
        None,
        "save and stop when the command has run so long",
        "days:hours:minutes:seconds",
        default_text="no limit",
        is_duration=True,
    )
    stall_minutes: float = option(
        30.0, "when nothing moved for so long, show what every rank is doing; 0 is never", "minutes", at_least=0
    )
    stall_end_minutes: float = option(
        90.0,
        "when nothing moved for so long after --stall_minutes, end all ranks with the status of a stop; 0 is never",
        "minutes",
        at_least=0,
    )


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run depends on, and nothing else."""

    model: ModelConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    deepspeed: DeepspeedConfig = field(default_factory=DeepspeedConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "lora": LoraConfig,
    "data": DataConfig,
    "loss": LossConfig,
    "optim": OptimConfig,
    "deepspeed": DeepspeedConfig,
    "train": TrainConfig,
    "output": OutputConfig,
    "checkpoint": CheckpointConfig,
}


def settings() -> dict[str, dataclasses.Field[Any]]:
    """Return every setting's dataclass field by its flat name, in the order of the sections."""
    return {item.name: item for section in SECTIONS.values() for item in dataclasses.fields(section)}


def default_text(item: dataclasses.Field[Any]) -> str:
    """Say a setting's default as a user would type it, or what an absent value means."""
    known: Option = item.metadata["option"]
    if known.default_text:
        return known.default_text
    if item.default is dataclasses.MISSING:
        return "required"
    if isinstance(item.default, bool):
        return "on" if item.default else "off"
    if isinstance(item.default, tuple):
        return " ".join(str(part) for part in item.default)
    return str(item.default)


def from_flat(values: dict[str, Any]) -> RunConfig:
    """Build a `RunConfig` from flat names; `pretrain` must be among them."""
    parts = {}
    for name, section in SECTIONS.items():
        own = {item.name for item in dataclasses.fields(section)}
        parts[name] = section(**{key: value for key, value in values.items() if key in own})
    return RunConfig(**parts)


def to_flat(config: RunConfig) -> dict[str, Any]:
    """Return every setting by its flat name: what trackers show and `run.yaml` holds."""
    return {key: value for section in dataclasses.asdict(config).values() for key, value in section.items()}


def with_resolved(config: RunConfig, **values: Any) -> RunConfig:
    """Return the configuration with some settings replaced, such as a dtype that is known only on the device."""
    unknown = values.keys() - settings().keys()
    assert not unknown, f"no such setting: {sorted(unknown)}"
    return from_flat({**to_flat(config), **values})


# What belongs to one start of a run, or to a process, and not to the run.
OF_ONE_START = ("local_rank", "load_checkpoint", "overwrite", "stop_after_steps", "max_time")


def to_yaml(config: RunConfig) -> str:
    """Return the YAML text that starts the same run again with `--config`.

    Absent values are left out, and so is what belongs to this start of it: how to resume, when to stop early.
    """
    kept = {key: value for key, value in to_flat(config).items() if value not in (None, []) and key not in OF_ONE_START}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()}
    # Escaped beyond ASCII: written raw, a next-line character (U+0085) would come back as a space.
    return yaml.safe_dump(plain, sort_keys=False)


def from_yaml(text: str) -> dict[str, Any]:
    """Return the settings that `to_yaml` wrote, by their flat names, without checking them.

    Raises:
        ValueError: the text is no YAML mapping.
    """
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError("no YAML mapping")
    return {str(name): value for name, value in values.items()}


def is_adapter_folder(pretrain: str) -> bool:
    """Return whether a name is the folder of a peft adapter."""
    return os.path.isfile(os.path.join(pretrain, "adapter_config.json"))


def policy_name(model: ModelConfig) -> str:
    """Return the name that the policy starts from, as owner/name@revision where a revision is asked for."""
    return f"{model.pretrain}@{model.revision}" if model.revision else model.pretrain


def reference_name(model: ModelConfig) -> str:
    """Return the reference's name, likewise: the policy's where nothing else is said."""
    revision = model.ref_revision
    if model.ref_pretrain in (None, model.pretrain):
        revision = revision or model.revision
    name = model.ref_pretrain or model.pretrain
    return f"{name}@{revision}" if revision else name


def trains_adapter(config: RunConfig) -> bool:
    """Return whether only an adapter trains: a new one, or that of the folder that training starts from."""
    return config.lora.lora_rank > 0 or is_adapter_folder(config.model.pretrain)


def ref_is_adapter(model: ModelConfig, *, has_adapter: bool) -> bool:
    """Return whether the reference is the policy itself, with its adapter off or as it started."""
    is_other = reference_name(model) != policy_name(model)
    return model.ref_mode == "adapter" or (model.ref_mode == "auto" and has_adapter and not is_other)


def may_be_cached(config: RunConfig, *, has_adapter: bool) -> bool:
    """Return whether the reference may be a cache: it is to be, or is if it is there."""
    moves = config.model.ref_sync_steps > 0
    if moves or config.loss.loss_type in TOKEN_LOSSES or ref_is_adapter(config.model, has_adapter=has_adapter):
        return False
    return config.model.ref_mode in ("auto", "cached")


def eval_sets(config: DataConfig) -> dict[str, str]:
    """Return the evaluation sets: name to path or Hub name, in the order given."""
    return dict(split_eval_set(item) for item in config.eval_dataset)


def split_eval_set(item: str) -> tuple[str, str]:
    """Split `NAME=PATH`; without a name the set is called after its file or folder, without the extension."""
    name, equals, path = item.partition("=")
    if equals and name and all(letter.isalnum() or letter in "_-." for letter in name):
        return name, os.path.expanduser(path)
    stem = item.rstrip("/").rpartition("/")[2].partition(".")[0]
    return stem or item, os.path.expanduser(item)


def openrlhf_differences(given: frozenset[str] | set[str], *, use_wandb: bool = False) -> list[str]:
    """Return a line for each default that differs from OpenRLHF 0.9's and was not given: "beta: 0.1 (OpenRLHF: 0.01)".

    W&B's names are left out unless it is on.
    """
    return [
        f"{name}: {default_text(item)} (OpenRLHF: {item.metadata['option'].openrlhf})"
        for name, item in settings().items()
        if item.metadata["option"].openrlhf and name not in given and (use_wandb or not name.startswith("wandb_"))
    ]
