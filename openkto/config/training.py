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
        "the learning rate schedule, by its name in transformers; linear, cosine and cosine_with_restarts end with a "
        "step at rate 0",
        choices=LR_SCHEDULERS,
        train_only=True,
        same_run=True,
    )
    lr_warmup_ratio: float = option(
        0.03,
        "length of the warm-up, in which the learning rate rises from 0",
        "fraction of all steps",
        at_least=0,
        below=1,
        train_only=True,
        same_run=True,
    )
    min_lr_ratio: float = option(
        0.1,
        "the lowest learning rate, for schedules that have one",
        "fraction of --learning_rate",
        at_least=0,
        below=1,
        train_only=True,
        same_run=True,
    )
    l2: float = option(0.0, "weight decay; not applied to norms and biases", at_least=0, train_only=True, same_run=True)
    adam_betas: tuple[float, float] = option(
        (0.9, 0.95), "Adam's beta1 and beta2", at_least=0, below=1, train_only=True, same_run=True
    )
    max_norm: float = option(
        1.0, "clip the global gradient norm to this value; 0 is no clipping", at_least=0, train_only=True, same_run=True
    )


@dataclass(frozen=True)
class DeepspeedConfig:
    zero_stage: int = option(
        2, "ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters", at_least=0, below=4
    )
    zpg: int = option(
        1,
        "ZeRO++: every N ranks, such as the GPUs of a node, hold a full copy of the parameters for the backward pass; "
        "1 is off; needs --zero_stage 3",
        "ranks",
        at_least=1,
        below=LARGE,
    )
    zero_quantized_weights: bool = option(
        False, "ZeRO++: send parameters in 8 bits, which rounds them; needs --zero_stage 3 and a GPU"
    )
    zero_quantized_gradients: bool = option(
        False,
        "ZeRO++: send gradients between nodes in 4 bits, which rounds them; needs --zero_stage 3, fp16 and a GPU",
        train_only=True,
    )
    ref_offload: bool = option(False, "keep the reference's parameters in CPU memory")
    adam_offload: bool = option(
        False,
        "keep the optimizer states in CPU memory and update there, on a GPU machine with DeepSpeed's CPU Adam",
        train_only=True,
    )
    param_offload: bool = option(
        False, "keep the policy's parameters in CPU memory; needs --zero_stage 3", train_only=True
    )
    offload_nvme_path: str | None = option(
        None,
        "a folder on a local NVMe disk for the states of --adam_offload; needs --zero_stage 3 and --disable_ds_ckpt",
        is_path=True,
        default_text="CPU memory",
        train_only=True,
    )
    reduce_bucket_size: int | None = option(
        None,
        "reduce gradients in buckets of N elements; this is also the size of the buffer",
        "elements",
        at_least=1,
        below=LARGE,
        default_text="5e7, or the number of trained parameters if smaller",
        train_only=True,
    )
    allgather_bucket_size: int | None = option(
        None,
        "at --zero_stage 3, gather N parameters ahead of their use",
        "elements",
        at_least=1,
        below=LARGE,
        default_text="5e7",
    )
    grad_accum_dtype: str | None = option(
        None,
        "the dtype of gradient accumulation",
        choices=("fp32", "bf16"),
        default_text="fp32 (bf16 loses 0.7% of the gradient)",
        openrlhf="the model's own",
        train_only=True,
        same_run=True,
    )
    overlap_comm: bool = option(False, "reduce gradients during the backward pass", train_only=True)
    deepcompile: bool = option(
        False,
        "let DeepSpeed compile the policy with its communication; needs a GPU and --zero_stage 1, 2 or 3",
        train_only=True,
    )
    tensor_parallel_size: int = option(
        1,
        "tensor parallelism (DeepSpeed's AutoTP): N GPUs share a model's weights and run the same rows; N must divide "
        "the number of GPUs",
        "GPUs",
        at_least=1,
        below=LARGE,
    )
    sequence_parallel_size: int = option(
        1,
        "sequence parallelism (DeepSpeed's Ulysses): N GPUs share the tokens of a micro-batch; N must divide the "
        "number of GPUs",
        "GPUs",
        at_least=1,
        below=LARGE,
    )
    ds_config: str | None = option(
        None,
        "a DeepSpeed JSON file whose values override the computed configuration",
        default_text="none",
        is_path=True,
        may_differ=True,
    )
    local_rank: int = option(-1, "set by the launcher", at_least=-1, below=LARGE, may_differ=True, of_one_start=True)


@dataclass(frozen=True)
class TrainConfig:
    train_batch_size: int = option(
        128,
        "the global batch: rows per optimizer step, over all GPUs",
        "rows",
        at_least=1,
        below=LARGE,
        train_only=True,
    )
    micro_train_batch_size: int | None = option(
        None,
        "at most N rows in a forward pass with gradient on one GPU; gradient accumulation follows from it; changes "
        "only speed and memory, never results",
        "rows",
        at_least=1,
        below=LARGE,
        default_text="8, or no limit with --max_tokens_per_micro_batch",
    )
    max_tokens_per_micro_batch: int | str | None = option(
        None,
        "at most N tokens, padding included, in a forward pass with gradient on one GPU; auto measures what fits; "
        "changes only speed and memory, never results",
        "tokens",
        at_least=1,
        below=LARGE,
        default_text="no limit",
    )
    max_epochs: int = option(1, "passes over the training rows", "epochs", at_least=1, below=LARGE, train_only=True)
    max_steps: int | None = option(
        None,
        "stop after N steps; the learning rate schedule ends there too",
        "steps",
        at_least=1,
        below=LARGE,
        default_text="from --max_epochs",
        train_only=True,
    )
    stop_after_steps: int | None = option(
        None,
        "stop early after N steps; the learning rate schedule stays that of the whole run",
        "steps",
        at_least=1,
        below=LARGE,
        default_text="never",
        train_only=True,
        of_one_start=True,
    )
    seed: int = option(42, "seed of the order of the rows", at_least=0, below=2**32)
    full_determinism: bool = option(False, "use only deterministic kernels: reruns are bit-identical, but slower")
    logging_steps: int = option(
        1, "log every N steps, over the rows of these steps", "steps", at_least=1, below=LARGE, train_only=True
    )
    eval_steps: int = option(
        -1,
        "evaluate every N steps; -1 is once per epoch, 0 is never",
        "steps",
        at_least=-1,
        below=LARGE,
        train_only=True,
    )
    eval_at_start: bool = option(False, "also evaluate before the first step", train_only=True)
    log_batches: bool = option(False, "write each step's row numbers to batches.jsonl", train_only=True)
    log_entropy: bool = option(False, "log the entropy of the policy's next-token distribution", train_only=True)
