"""Settings of the run: optimizer and schedule, engine, batches and steps."""

from __future__ import annotations

from dataclasses import dataclass

from openkto.config.option import LARGE, option

# The schedules of transformers' SchedulerType that are functions of the step; the first end at min_lr_ratio.
FLOORED_SCHEDULES = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "polynomial", "warmup_stable_decay")
LR_SCHEDULERS = (
    *(*FLOORED_SCHEDULES, "linear", "cosine", "cosine_with_restarts"),
    *("constant", "constant_with_warmup", "inverse_sqrt"),
)
METRIC_SCHEDULERS = ("reduce_lr_on_plateau", "greedy")
DEFAULT_LEARNING_RATE = 1e-6
DEFAULT_LORA_LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class OptimConfig:
    learning_rate: float | None = option(
        None,
        "the highest learning rate of the schedule",
        above=0,
        below=10,
        default_text="1e-6, with LoRA 1e-5",
        openrlhf="1e-5",
        train_only=True,
        same_run=True,
    )
    lr_scheduler: str = option(
        "cosine_with_min_lr",
        "the schedule, by its name in transformers; linear, cosine and cosine_with_restarts end in a step at rate 0",
        choices=LR_SCHEDULERS,
        train_only=True,
        same_run=True,
    )
    lr_warmup_ratio: float = option(
        0.03,
        "warm-up, in which the learning rate rises from 0",
        "share of all steps",
        at_least=0,
        below=1,
        train_only=True,
        same_run=True,
    )
    min_lr_ratio: float = option(
        0.1,
        "the floor of schedules that have one",
        "share of --learning_rate",
        at_least=0,
        below=1,
        train_only=True,
        same_run=True,
    )
    l2: float = option(0.0, "weight decay; norms and biases have none", at_least=0, train_only=True, same_run=True)
    adam_betas: tuple[float, float] = option(
        (0.9, 0.95), "Adam's two averaging factors", at_least=0, below=1, train_only=True, same_run=True
    )
    max_norm: float = option(
        1.0, "clip the global gradient norm to this; 0 is no clipping", at_least=0, train_only=True, same_run=True
    )


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
        False,
        "ZeRO++: send gradients between nodes in 4 bits, which rounds them; --zero_stage 3, fp16, a GPU",
        train_only=True,
    )
    ref_offload: bool = option(False, "keep the reference's parameters in CPU memory")
    adam_offload: bool = option(
        False,
        "keep the optimizer's states in CPU memory, and update there, with DeepSpeed's CPU Adam beside a GPU",
        train_only=True,
    )
    param_offload: bool = option(False, "keep the policy's parameters in CPU memory; --zero_stage 3", train_only=True)
    offload_nvme_path: str | None = option(
        None,
        "a folder on a local NVMe disk where --adam_offload keeps the states instead; --zero_stage 3, no checkpoints",
        is_path=True,
        default_text="CPU memory",
        train_only=True,
    )
    reduce_bucket_size: int | None = option(
        None,
        "reduce so many gradients at a time: a buffer of that size",
        "elements",
        at_least=1,
        below=LARGE,
        default_text="5e7, or all that train if fewer",
        train_only=True,
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
        train_only=True,
        same_run=True,
    )
    overlap_comm: bool = option(False, "reduce gradients during the backward pass", train_only=True)
    deepcompile: bool = option(
        False,
        "let DeepSpeed compile the policy, communication included; needs a GPU and --zero_stage 1, 2 or 3",
        train_only=True,
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
        None,
        "a DeepSpeed JSON file laid over the computed configuration",
        default_text="none",
        is_path=True,
        may_differ=True,
    )
    local_rank: int = option(-1, "set by the launcher", at_least=-1, below=LARGE, may_differ=True, of_one_start=True)


@dataclass(frozen=True)
class TrainConfig:
    train_batch_size: int = option(
        128, "the global batch: one optimizer step over all GPUs", "rows", at_least=1, below=LARGE, train_only=True
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
    max_epochs: int = option(1, "times over the training rows", "epochs", at_least=1, below=LARGE, train_only=True)
    max_steps: int | None = option(
        None,
        "length of the run, schedule included",
        "steps",
        at_least=1,
        below=LARGE,
        default_text="from --max_epochs",
        train_only=True,
    )
    stop_after_steps: int | None = option(
        None,
        "stop early, with the schedule as it was",
        "steps",
        at_least=1,
        below=LARGE,
        default_text="never",
        train_only=True,
        of_one_start=True,
    )
    seed: int = option(42, "seed of the order of rows", at_least=0, below=2**32)
    full_determinism: bool = option(False, "only deterministic kernels: bit-identical reruns, slower")
    logging_steps: int = option(
        1, "log every so many, pooled over them", "steps", at_least=1, below=LARGE, train_only=True
    )
    eval_steps: int = option(
        -1, "evaluate every so many; -1 once an epoch, 0 never", "steps", at_least=-1, below=LARGE, train_only=True
    )
    eval_at_start: bool = option(False, "also evaluate before the first step", train_only=True)
    log_batches: bool = option(False, "write each step's row numbers to batches.jsonl", train_only=True)
    log_entropy: bool = option(False, "log the entropy of the policy's next-token distribution", train_only=True)
