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
        None, "the frozen reference, likewise", default_text="what training starts from", is_path=True, may_differ=True
    )
    revision: str | None = option(
        None,
        "the branch, tag or commit of --pretrain, a model on the Hub; owner/name@revision says the same",
        default_text="the newest",
        may_differ=True,
    )
    ref_revision: str | None = option(
        None,
        "likewise, of the reference",
        default_text="the newest; that of --pretrain where the model is the same",
        may_differ=True,
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
        train_only=True,
        same_run=True,
    )
    ref_sync_alpha: float = option(
        0.6,
        "how far: 1 makes the reference the policy",
        "share of the way",
        above=0,
        at_most=1,
        train_only=True,
        same_run=True,
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
        "recompute activations in the backward pass: all of them, or, selective, all but the results of matrix "
        "products and attention: less memory, slower",
        choices=("true", "false", "selective"),
        train_only=True,
    )
    gradient_checkpointing_use_reentrant: bool = option(
        False, "use torch's reentrant form of gradient checkpointing", train_only=True
    )
    use_liger_kernel: bool = option(
        False, "take the Liger package's fused norms, rotary positions and SwiGLU in known models; needs a GPU"
    )
    torch_compile: bool = option(
        False,
        "compile the model's layers, and the head's passes over logits, with torch.compile: a slow start, faster steps",
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
        "the modules to adapt, by the ends of their names; all-linear is every linear one, experts too, but the head "
        "and routers",
        default_text=ALL_LINEAR,
        train_only=True,
        same_run=True,
    )
    lora_dropout: float = option(
        0.0,
        "dropout in the adapter, only in the forwards that train",
        "probability",
        at_least=0,
        below=1,
        train_only=True,
        same_run=True,
    )
    use_rslora: bool = option(False, "scale the adapter by alpha / sqrt(rank) (rsLoRA)", train_only=True, same_run=True)
    use_dora: bool = option(
        False, "also train the length of each output's weight vector (DoRA)", train_only=True, same_run=True
    )
    lora_modules_to_save: list[str] = option(  # noqa: RUF009 (a plain field)
        [],
        "modules to train whole and to save with the adapter, by the ends of their names",
        default_text="none",
        train_only=True,
        same_run=True,
    )
    target_parameters: list[str] = option(  # noqa: RUF009 (a plain field)
        [],
        "the experts' weights to adapt, by the ends of their names, such as mlp.experts.gate_up_proj, and no others",
        default_text="those that --target_modules names",
        train_only=True,
        same_run=True,
    )
    load_in_4bit: bool = option(
        False, "keep the frozen weights in 4 bits (QLoRA); needs a GPU and bitsandbytes", same_run=True
    )


@dataclass(frozen=True)
class LossConfig:
    loss_type: str = option(
        "kto", "the objective; docs/losses.md says when to use which", choices=tuple(LOSSES), same_run=True
    )
    beta: float = option(
        0.1,
        "how strongly the policy is held to the reference; larger is closer",
        above=0,
        openrlhf="0.01",
        same_run=True,
    )
    desirable_loss_weight: float | str = option(
        1.0,
        "weight of desirable rows; auto raises the smaller class until both weigh the same",
        at_least=0,
        same_run=True,
    )
    undesirable_loss_weight: float | str = option(
        1.0,
        "weight of undesirable rows; auto raises the smaller class until both weigh the same",
        at_least=0,
        same_run=True,
    )
    label_smoothing: float = option(
        0.0, "the probability with which a label is taken to be wrong", at_least=0, below=0.5, same_run=True
    )
    sft_loss_coef: float = option(
        0.0, "weight of the negative log-likelihood of the desirable rows' completion tokens", at_least=0, same_run=True
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
        0.0, "weight of the balancing loss of mixture-of-experts models", at_least=0, train_only=True, same_run=True
    )

    @property
    def facts(self) -> LossFacts:
        """What is known of the chosen objective."""
        return LOSSES[self.loss_type]
