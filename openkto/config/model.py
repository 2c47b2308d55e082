"""Settings of the models: policy, reference, adapter and loss."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from openkto.config.losses import LOSSES, LossFacts
from openkto.config.option import LARGE, option

PackingChoice = Literal["auto", "on", "off"]
PACKING: tuple[PackingChoice, ...] = ("auto", "on", "off")
ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
DTYPES = ("bf16", "fp16", "fp32")
REF_MODES = ("auto", "model", "adapter", "cached")
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class ModelConfig:
    pretrain: str = option(
        dataclasses.MISSING,
        "the policy to start from: a Hugging Face name, a folder, or a LoRA adapter's folder, which is trained further",
        is_path=True,
        may_differ=True,
    )
    ref_pretrain: str | None = option(
        None,
        "the frozen reference model: a Hugging Face name, a folder, or a LoRA adapter's folder",
        default_text="what training starts from",
        is_path=True,
        may_differ=True,
    )
    revision: str | None = option(
        None,
        "the branch, tag or commit of --pretrain on the Hub; the same as --pretrain owner/name@revision",
        default_text="the newest",
        may_differ=True,
    )
    ref_revision: str | None = option(
        None,
        "the branch, tag or commit of the reference model on the Hub",
        default_text="the newest; if the model is the same, that of --pretrain",
        may_differ=True,
    )
    ref_mode: str = option(
        "auto",
        "where the reference's log-probabilities come from. model: a second model; adapter: the policy with its LoRA "
        "adapter off, or with the adapter that it started from; cached: computed once before training and kept on "
        "disk. auto: adapter if the policy has one and --ref_pretrain names no other model, else cached if that costs "
        "no more tokens than a model in the loop runs, else model",
        choices=REF_MODES,
    )
    ref_sync_steps: int = option(
        0,
        "every N steps, move the reference towards the policy (TR-DPO); 0 is never",
        "steps",
        at_least=0,
        below=LARGE,
        train_only=True,
        same_run=True,
    )
    ref_sync_alpha: float = option(
        0.6,
        "how far --ref_sync_steps moves the reference: 1 makes it equal to the policy",
        "fraction",
        above=0,
        at_most=1,
        train_only=True,
        same_run=True,
    )
    ref_cache_dir: str | None = option(
        None,
        "folder of the cached reference log-probabilities; on several nodes it must be on a shared disk",
        default_text="ref in $OPENKTO_CACHE or ~/.cache/openkto",
        is_path=True,
    )
    use_ms: bool = option(False, "load models from ModelScope instead of the Hugging Face Hub; needs its package")
    trust_remote_code: bool = option(False, "run Python code that comes with a model or tokenizer")
    disable_fast_tokenizer: bool = option(False, "use the tokenizer's slow implementation")
    attn_implementation: str = option(
        "auto",
        "the attention kernel; auto takes the best one that is installed",
        choices=ATTENTION,
        openrlhf="flash_attention_2",
    )
    packing: str = option(
        "auto",
        "put the rows of a micro-batch end to end, without padding; auto does so if the model's attention supports it",
        choices=PACKING,
    )
    share_prompts: str = option(
        "auto",
        "run a prompt once for all of its completions in the batch, those of mismatched pairs among them; auto does so "
        "if rows are packed with OpenKTO's own attention, and says why if not",
        choices=PACKING,
    )
    param_dtype: str | None = option(
        None,
        "the dtype that the model computes in; the optimizer's copy is always fp32",
        choices=DTYPES,
        default_text="bf16 on a GPU, fp32 on a CPU",
        openrlhf="bf16",
        same_run=True,
    )
    export_dtype: str | None = option(
        None,
        "the dtype of the saved model or adapter",
        choices=DTYPES,
        default_text="the same as --param_dtype; merged, the base model's",
        train_only=True,
    )
    gradient_checkpointing: bool | str = option(
        False,
        "recompute activations in the backward pass, which saves memory and is slower; selective keeps the results of "
        "matrix products and attention and recomputes the rest",
        choices=("true", "false", "selective"),
        train_only=True,
    )
    gradient_checkpointing_use_reentrant: bool = option(
        False, "use torch's reentrant gradient checkpointing", train_only=True
    )
    use_liger_kernel: bool = option(
        False, "use the Liger package's fused norms, rotary embeddings and SwiGLU in models that it knows; needs a GPU"
    )
    torch_compile: bool = option(
        False,
        "compile the model's layers and its head with torch.compile: a slow start, then faster steps",
        train_only=True,
    )


@dataclass(frozen=True)
class LoraConfig:
    lora_rank: int = option(
        0,
        "rank of the LoRA adapter to train; 0 trains all parameters",
        at_least=0,
        below=LARGE,
        train_only=True,
        same_run=True,
    )
    lora_alpha: int = option(
        16, "the adapter is scaled by alpha / rank", at_least=1, below=LARGE, train_only=True, same_run=True
    )
    target_modules: list[str] = option(  # noqa: RUF009 (a plain field)
        [ALL_LINEAR],
        "the modules to adapt, by the ends of their names; all-linear is every linear layer, experts included, except "
        "the head and the routers",
        default_text=ALL_LINEAR,
        train_only=True,
        same_run=True,
    )
    lora_dropout: float = option(
        0.0,
        "dropout in the adapter, only in forward passes that train",
        "probability",
        at_least=0,
        below=1,
        train_only=True,
        same_run=True,
    )
    use_rslora: bool = option(False, "scale the adapter by alpha / sqrt(rank) (rsLoRA)", train_only=True, same_run=True)
    use_dora: bool = option(
        False, "also train the magnitude of each output's weight vector (DoRA)", train_only=True, same_run=True
    )
    lora_modules_to_save: list[str] = option(  # noqa: RUF009 (a plain field)
        [],
        "modules to train in full and to save with the adapter, by the ends of their names",
        default_text="none",
        train_only=True,
        same_run=True,
    )
    target_parameters: list[str] = option(  # noqa: RUF009 (a plain field)
        [],
        "adapt only these weights of the experts, by the ends of their names, such as mlp.experts.gate_up_proj",
        default_text="those that --target_modules names",
        train_only=True,
        same_run=True,
    )
    load_in_4bit: bool = option(
        False, "keep the frozen weights in 4 bits (QLoRA); needs a GPU and the package bitsandbytes", same_run=True
    )


@dataclass(frozen=True)
class LossConfig:
    loss_type: str = option(
        "kto", "the loss; docs/losses.md says when to use which", choices=tuple(LOSSES), same_run=True
    )
    beta: float = option(
        0.1,
        "how strongly the policy is kept near the reference; a larger value keeps it nearer",
        above=0,
        openrlhf="0.01",
        same_run=True,
    )
    desirable_loss_weight: float | str = option(
        1.0,
        "weight of desirable rows; auto raises the weight of the smaller class until both classes weigh the same",
        at_least=0,
        same_run=True,
    )
    undesirable_loss_weight: float | str = option(
        1.0,
        "weight of undesirable rows; auto raises the weight of the smaller class until both classes weigh the same",
        at_least=0,
        same_run=True,
    )
    label_smoothing: float = option(0.0, "the probability that a label is wrong", at_least=0, below=0.5, same_run=True)
    sft_loss_coef: float = option(
        0.0,
        "weight of an SFT term: the negative log-likelihood of the desirable rows' completion tokens",
        at_least=0,
        same_run=True,
    )
    humanline_low: float = option(
        -1.0,
        "kto_humanline: a token's log-ratio is clamped to at least this",
        "nats",
        at_least=-100,
        below=0,
        same_run=True,
    )
    humanline_high: float = option(
        1.5, "kto_humanline: a token's log-ratio is clamped to at most this", "nats", above=0, below=100, same_run=True
    )
    aux_loss_coef: float = option(
        0.0,
        "weight of the load-balancing loss of mixture-of-experts models",
        at_least=0,
        train_only=True,
        same_run=True,
    )

    @property
    def facts(self) -> LossFacts:
        """What is known of the chosen objective."""
        return LOSSES[self.loss_type]
