"""The policy and the reference: a causal language model that answers with the log-probabilities of completions.

Shapes:  B = rows in the micro-batch, T = its longest row, P = tokens of all its rows, K = scored tokens,
         H = hidden size.
Units:   nats.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from openkto.config import LoraConfig, PackingChoice, is_adapter_folder
from openkto.errors import ConfigError
from openkto.models.adapter import add_lora, load_adapter, reference_weights
from openkto.models.checks import check_forward
from openkto.models.experts import expert_counts
from openkto.models.export import export_adapter, export_model
from openkto.models.kept_keys import KeptKeys
from openkto.models.kernels import compile_layers
from openkto.models.loading import load_model
from openkto.models.log_probs import logit_map_of, row_sums, token_entropies, token_log_probs
from openkto.models.lora_targets import describe_targets
from openkto.models.onednn import is_faster_here, use_onednn
from openkto.models.packed_attention import PACKED, Sharers
from openkto.models.packing import PACKING_ATTENTION, own_slice, pack, predictors, start_packing
from openkto.models.randomness import disable_randomness
from openkto.models.recompute import recompute_activations
from openkto.models.split_plan import Style, check_heads, split_plan

log = logging.getLogger(__name__)


class ActorOutput(NamedTuple):
    """What a forward returns; the last three only where they were asked for, else zeros or nothing."""

    log_prob_B: Tensor  # [B] float64, summed over the scored tokens; without gradient beside log_prob_K
    entropy_B: Tensor  # [B] float64, without gradient
    balancing_loss: Tensor  # scalar: the experts' load-balancing loss of this micro-batch
    log_prob_K: Tensor  # [K] float32, of each scored token, row by row


class Actor(nn.Module):
    """Wraps a causal language model so that its forward gives log pi(y|x) of each row.

    Only the positions that predict scored tokens go through the head. There is no dropout but an adapter's own, and
    only in training mode. An adapter's folder gives its base model with the adapter on it.

    Args:
        pretrain_or_model: a folder, a Hub name, or a loaded model.
        dtype: of the parameters, when loading.
        attn_implementation: `auto` or a name that transformers knows, when loading.
        packing: lay a micro-batch's rows end to end, without padding; `auto` does where the model's attention can.
        share_prompts: let a prompt run once; see `openkto/trainer/planning.py` and `prompt_reuse.py` there.
        trust_remote_code: run the model's own Python, when loading.
        gradient_checkpointing: recompute the layers' activations in the backward pass, or, "selective", those that
            cost little; see `openkto/models/recompute.py`.
        use_reentrant: torch's older kind of checkpointing.
        use_liger_kernel: take the Liger package's layers, when loading.
        compile_backend: compile the layers and the head's passes over logits with this backend of torch.compile;
            None does not.
        lora: of the new adapter to put on the model; where `pretrain_or_model` is an adapter's folder, only its
            dropout counts.
        keeps_start: keep an adapter that is loaded as it starts, too, for `reference()`.

    Raises:
        ConfigError: the model is of a kind that cannot be trained here.
    """

    def __init__(
        self,
        pretrain_or_model: str | PreTrainedModel,
        *,
        dtype: torch.dtype = torch.float32,
        attn_implementation: str = "auto",
        packing: PackingChoice = "auto",
        share_prompts: PackingChoice = "auto",
        trust_remote_code: bool = False,
        gradient_checkpointing: bool | str = False,
        use_reentrant: bool = False,
        use_liger_kernel: bool = False,
        compile_backend: str | None = None,
        lora: LoraConfig | None = None,
        keeps_start: bool = False,
    ) -> None:
        super().__init__()
        lora, adapter = lora or LoraConfig(), None
        if isinstance(pretrain_or_model, str):
            adapter = pretrain_or_model if is_adapter_folder(pretrain_or_model) else None
            pretrain_or_model = load_model(
                pretrain_or_model,
                dtype=dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                load_in_4bit=lora.load_in_4bit,
                use_liger_kernel=use_liger_kernel,
            )
        self.model: PreTrainedModel | PeftModel = pretrain_or_model
        config = self.model.config
        head = self.model.get_output_embeddings()
        own = {name for name, _ in head.named_parameters()} if isinstance(head, nn.Module) else set()
        if self.body is self.model or not {"weight"} <= own <= {"weight", "bias"}:
            raise ConfigError(
                f"--pretrain: the model must have a body and a linear head; got {type(self.model).__name__}. "
                "Name a causal language model."
            )
        # "vision" is causal for text.
        if config.get_text_config().to_dict().get("use_bidirectional_attention") in (True, "all"):
            raise ConfigError(
                f"--pretrain: each token must see only what came before it; got {type(self.model).__name__} with "
                "use_bidirectional_attention. Name a causal language model."
            )
        self.logit_map = logit_map_of(config)
        self.num_experts, self.experts_per_token = expert_counts(self.model)
        self.changes = disable_randomness(self.model)
        self.packing, self.share_prompts, self.shared_differs = packing, share_prompts, False
        self.attention_without_packing = self.model.config._attn_implementation
        self.packs = start_packing(self.model, packing, attn_implementation)
        self.sharers: Sharers | None = None
        self.recomputes_selectively = is_selective = gradient_checkpointing == "selective"
        if gradient_checkpointing:
            recompute_activations(self.model, selective=is_selective, use_reentrant=use_reentrant)
        self.compile_backend = compile_backend
        if compile_backend is not None:
            compile_layers(self.model, compile_backend)
        if adapter is not None:
            self.model = load_adapter(self.model, adapter, lora_dropout=lora.lora_dropout, keeps_start=keeps_start)
        elif lora.lora_rank > 0:
            self.model = add_lora(self.model, lora)

    @property
    def has_adapter(self) -> bool:
        """Whether only an adapter trains and is saved."""
        return isinstance(self.model, PeftModel)

    def describe_adapter(self) -> str:
        """Say what the adapter changes."""
        assert isinstance(self.model, PeftModel), "there is an adapter to describe"
        return describe_targets(self.model)

    @property
    def language_model(self) -> PreTrainedModel:
        """The transformers model itself, with the adapter's layers in it."""
        model: Any = self.model
        return model.get_base_model() if self.has_adapter else model

    @property
    def body(self) -> nn.Module:
        """What gives the hidden states that the head reads."""
        model = self.language_model
        body: nn.Module = model.base_model
        if body is model:
            # Some name their body otherwise than their class says.
            inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
            return inner[0] if len(inner) == 1 else model
        return body

    def run_on(self, device: torch.device) -> None:
        """Take the layers that are fast on a device; parameters stay the same objects, where they are."""
        if device.type == "cpu" and is_faster_here():
            use_onednn(self)

    def share_tokens(self, sharers: Sharers) -> None:
        """Run a slice of each packed row from now on, and let the other ranks run theirs.

        Raises:
            ConfigError: the model's rows are not packed, or its attention heads cannot be divided among N ranks.
        """
        if not self.packs:
            raise ConfigError(
                f"--sequence_parallel_size: cuts packed rows; got {type(self.language_model).__name__}, whose rows are "
                "padded. Leave it out."
            )
        check_heads(self.model.config, sharers.size, "--sequence_parallel_size", repeats_keys=True)
        self.sharers = sharers
        self.language_model.set_attn_implementation(PACKED)

    def split_plan(self, size: int) -> dict[str, Style]:
        """Return how each layer is cut where `size` ranks share the weights, by its name here; see `split_plan.py`."""
        assert not self.recomputes_selectively, "DeepSpeed's layers change in place what is kept for the backward"
        return split_plan(self, self.model.config, size)

    def reference(self) -> contextlib.AbstractContextManager[None]:
        """Inside, forwards are those of the model that training started from: an adapter is off, or as it was."""
        assert isinstance(self.model, PeftModel), "a policy without an adapter is not its own reference"
        return reference_weights(self.model)

    def stop_also_at(self, ids: list[int]) -> None:
        """Let the saved model's generation end at these tokens, too."""
        generation = self.language_model.generation_config
        if ids and generation is not None:
            known = generation.eos_token_id
            known = [] if known is None else known if isinstance(known, list) else [known]
            generation.eos_token_id = [*known, *ids]

    def export(self, weights: dict[str, Tensor], tokenizer: Any, folder: str | Path, dtype: torch.dtype) -> None:
        """Write what was trained, the model or the adapter, with its tokenizer.

        Args:
            weights: the state dict of `model` in `dtype`; with an adapter, of what trains.

        Raises:
            OpenKTOError: the folder cannot be written.
        """
        if isinstance(self.model, PeftModel):
            export_adapter(self.model, weights, tokenizer, folder)
        else:
            export_model(self.model, weights, tokenizer, folder, dtype, self.changes.of(self.model.config))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        token_index: Tensor | None = None,
        scored_index: Tensor | None = None,
        place_index: Tensor | None = None,
        query_bounds: Tensor | None = None,
        *,
        kept_keys: KeptKeys | None = None,
        with_entropy: bool = False,
        with_balancing_loss: bool = False,
        with_tokens: bool = False,
    ) -> ActorOutput:
        """Return the summed log-probabilities of the scored tokens.

        The two indices say what the masks do; left out they are looked for, which makes a GPU's host wait.

        Args:
            input_ids: [B, T], padded on the right.
            attention_mask: [B, T], 1 on tokens, 0 on padding.
            loss_mask: [B, T], True on scored tokens; never on a row's first token.
            token_index: [P], where `attention_mask` is 1 in the flattened rows.
            scored_index: [K], where `loss_mask` is True in them.
            place_index, query_bounds: see `Packed`, where rows share prompts and `token_index` has each once.
            kept_keys: of the tokens of another forward, which `place_index` counts after those that run; packed rows.
            with_entropy: also sum the entropies of the distributions that predict them.
            with_balancing_loss: also compute the load-balancing loss (Switch Transformer, arXiv:2101.03961v3, eq. 4).
            with_tokens: also return each scored token's log-probability, with the gradient only through these.
        """
        if token_index is None or scored_index is None:
            token_index, scored_index = (mask.flatten().nonzero()[:, 0] for mask in (attention_mask, loss_mask))
        inputs: dict[str, Any]
        if self.packs:
            packed = pack(input_ids, attention_mask, token_index, place_index, query_bounds)
            inputs = packed.for_model()
            if self.sharers is not None:
                inputs = own_slice(packed, self.sharers).for_model() | {"sharers": self.sharers}
            if kept_keys is not None:
                inputs["kept_keys"] = kept_keys
            predictor_K = predictors(attention_mask, scored_index, place_index)
        else:
            # No mask is passed on: in a causal model padding on the right is seen by nobody, and unmasked attention
            # has faster kernels.
            inputs, predictor_K = {"input_ids": input_ids}, scored_index - 1
        outputs = self.body(
            **inputs,
            use_cache=False,
            return_dict=True,
            **({"output_router_logits": True} if with_balancing_loss else {}),
        )
        hidden_PH = outputs.last_hidden_state.flatten(0, 1)
        token_K = input_ids.flatten().index_select(0, scored_index)
        own_K = None
        if self.sharers is not None:
            predictor_K = predictor_K - self.sharers.rank * len(hidden_PH)
            # Each rank predicts from its own slice; which tokens these are, the host has to wait for.
            own_K = ((predictor_K >= 0) & (predictor_K < len(hidden_PH))).nonzero()[:, 0]
            predictor_K, token_K = predictor_K[own_K], token_K[own_K]
        hidden_KH = hidden_PH.index_select(0, predictor_K)
        head = self.language_model.get_output_embeddings()
        weight, bias = head.weight, head.bias
        log_prob_K = token_log_probs(hidden_KH, weight, bias, token_K, self.logit_map, self.compile_backend)
        log_prob_K = self._of_all(log_prob_K, own_K, len(scored_index))
        entropy_B = hidden_KH.new_zeros(len(input_ids), dtype=torch.float64)
        if with_entropy:
            entropy_K = token_entropies(hidden_KH.detach(), weight, bias, self.logit_map)
            entropy_B = row_sums(self._of_all(entropy_K, own_K, len(scored_index)), loss_mask)
        balancing_loss = hidden_KH.new_zeros((), dtype=torch.float32)
        if with_balancing_loss:
            balancing_loss = load_balancing_loss_func(
                self._router_logits(outputs, len(token_index)),
                self.num_experts,
                self.experts_per_token,
                None if self.packs else attention_mask,
            )
        # Of the two only the one that the loss reads carries a gradient.
        summed_K = log_prob_K.detach() if with_tokens else log_prob_K
        tokens_K = log_prob_K if with_tokens else log_prob_K.new_zeros(0)
        return ActorOutput(row_sums(summed_K, loss_mask), entropy_B, balancing_loss, tokens_K)

    def _of_all(self, value_K: Tensor, own_K: Tensor | None, count: int) -> Tensor:
        """Return the values of all scored tokens, where this rank has those of its slice."""
        if self.sharers is None or own_K is None:
            return value_K
        return self.sharers.total(value_K.new_zeros(count).index_copy(0, own_K, value_K))

    def _router_logits(self, outputs: Any, count: int) -> Any:
        """Return each layer's router logits of all the micro-batch's tokens, where this rank has those of its slice.

        Raises:
            ConfigError: the model does not give them.
        """
        own = outputs.get("router_logits")
        if not own or any(logits.shape[-1] != self.num_experts for logits in own):
            raise ConfigError(
                "--aux_loss_coef: needs a model that gives its routers' logits, of all experts; got "
                f"{type(self.language_model).__name__}, which does not. Leave it out."
            )
        if self.sharers is None:
            return own
        return tuple(self.sharers.together(logits)[:count] for logits in own)

    def check_forward(self, tolerance: float, place: str = "--pretrain", *, with_balancing_loss: bool = False) -> None:
        """Compare a short forward with the model's own logits; see `openkto/models/checks.py`.

        Raises:
            ConfigError: they differ by more than `tolerance` nats a token, or there is no balancing loss.
        """
        check_forward(self, tolerance, place, with_balancing_loss=with_balancing_loss)

    def stop_packing(self) -> None:
        """Pad rows from now on."""
        self.packs = False
        self.language_model.set_attn_implementation(self.attention_without_packing)

    @contextlib.contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Inside, the model is in evaluation with the settings that it came with, and attention goes by masks."""
        model, was_training = self.language_model, self.training
        attention = model.config._attn_implementation
        with_masks = self.attention_without_packing
        if with_masks in PACKING_ATTENTION:
            with_masks = "sdpa" if model._supports_sdpa else "eager"
        self.eval()
        self.changes.take_back()
        model.set_attn_implementation(with_masks)
        try:
            yield
        finally:
            model.set_attn_implementation(attention)
            self.changes.make()
            self.train(was_training)
