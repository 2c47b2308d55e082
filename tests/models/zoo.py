"""Tiny configurations of the causal language models that transformers has, by their type."""

import inspect
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 97

# By the names that configurations have for their sizes; each takes those that it knows.
SIZES = dict(
    vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "dim_model"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size", "output_embedding_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_dim", "ffn_hidden_size", "n_inner"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "feed_forward_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers"), 3),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_attention_groups"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 128),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size", "sliding_window_size"), 8),
    **dict.fromkeys(("head_dim", "attention_head_size", "hidden_size_per_layer_input", "local_attention"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "moe_n_group", "max_window_layers"), 1),
    first_k_dense_replace=1,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "n_groups"), 2),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "time_step_rank", "mamba_dt_rank"), 4),
    mamba_d_ssm=64, state_size=8, mamba_chunk_size=16, chunk_size=16, use_mamba_kernels=False, use_sliding_window=True,
    original_max_position_embeddings=16,
)  # fmt: skip

# What a type needs beside them.
CHANGES: dict[str, dict[str, Any]] = {
    "codegen": dict(rotary_dim=4),
    "dots1": dict(n_shared_experts=1),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1], [["global"], 1]]),
    "gptj": dict(rotary_dim=4),
    "lfm2_moe": dict(num_dense_layers=1, layer_types=["conv", "full_attention", "full_attention"]),
    "mamba2": dict(expand=2, num_heads=4, head_dim=16, n_groups=1),
    "roc_bert": dict(enable_pronunciation=False, enable_shape=False, is_decoder=True),
    "longcat_flash": dict(zero_expert_num=0),
    "zaya": dict(num_experts_per_tok=1),
}
# The types that see images or sound, or have an encoder: a run refuses them by their configuration.
COMPOSITE = {
    "blt", "dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_assistant", "gemma4_unified",
    "gemma4_unified_assistant", "git", "got_ocr2", "llama4", "mllama", "moss_transcribe_diarize", "moshi", "musicgen",
    "musicgen_melody", "phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp",
}  # fmt: skip
# Those that do not become tiny by sizes: each has a configuration of its own kind.
UNMADE = {
    "cohere_compass_text", "dbrx", "dots3_note_text", "gemma3n_text", "inkling2_loop_text", "inkling2_text",
    "nemotron_h", "reformer", "xmod", "zamba", "zamba2",
}  # fmt: skip
KINDS = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - COMPOSITE - UNMADE)
# xglm masks with the least float32, which float64 cannot hold as such.
IN_FLOAT32 = {"xglm"}
STATES = ("A_log", "dt_", "conv1d", "decay")  # weights whose size matters to a recurrence


def tiny_config(kind: str, **changes: Any) -> transformers.PretrainedConfig:
    """Return a configuration of this type with a few layers of a few dozen units."""
    config_class = CONFIG_MAPPING[kind]
    known = set(inspect.signature(config_class.__init__).parameters) | set(config_class().to_dict())
    settings = {name: value for name, value in SIZES.items() if name in known or name in config_class.attribute_map}
    if "kv_lora_rank" in settings and "num_key_value_heads" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    return config_class(**(settings | CHANGES.get(kind, {}) | changes))


def tiny_model(kind: str, **changes: Any) -> transformers.PreTrainedModel:
    """Return a random model of this type in float64, whose experts run one by one."""
    torch.manual_seed(0)
    config = tiny_config(kind, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not any(part in name for part in STATES):
            torch.nn.init.normal_(parameter, std=0.15)
    return model if kind in IN_FLOAT32 else model.double()
