"""Tiny configurations of the architectures whose log-probabilities are tested, and a batch of rows for them."""

import torch
import transformers

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GEMMA = SIZES | dict(head_dim=8, sliding_window=8)
MOE = SIZES | dict(num_experts_per_tok=2)

CONFIGS = {
    "Llama": transformers.LlamaConfig(**SIZES, attention_dropout=0.3),
    "Llama tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "Qwen2": transformers.Qwen2Config(**SIZES),
    "Qwen3": transformers.Qwen3Config(**SIZES, head_dim=8),
    "Gemma2": transformers.Gemma2Config(**GEMMA, final_logit_softcapping=3.0, query_pre_attn_scalar=8),
    "Gemma3": transformers.Gemma3TextConfig(**GEMMA, final_logit_softcapping=3.0, query_pre_attn_scalar=8),
    "Mistral": transformers.MistralConfig(**SIZES, sliding_window=8),
    "Phi3": transformers.Phi3Config(**SIZES, resid_pdrop=0.3, embd_pdrop=0.3),
    "GPT-2": transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3
    ),
    "GPT-NeoX": transformers.GPTNeoXConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, hidden_dropout=0.3, attention_dropout=0.3,
    ),
    "OPT": transformers.OPTConfig(
        vocab_size=97, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, dropout=0.3, layerdrop=0.3, word_embed_proj_dim=16, pad_token_id=1,
    ),
    "Phi, whose head has a bias": transformers.PhiConfig(**SIZES, resid_pdrop=0.3),
    "Cohere": transformers.CohereConfig(**SIZES, logit_scale=0.25),
    "Granite": transformers.GraniteConfig(**SIZES, logits_scaling=4.0),
    "Mixtral": transformers.MixtralConfig(**MOE, num_local_experts=4, router_jitter_noise=0.3),
    "Qwen3-MoE": transformers.Qwen3MoeConfig(**MOE, num_experts=4, moe_intermediate_size=16, head_dim=8),
}  # fmt: skip


def random_model(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def right_padded_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 97, (3, 20), generator=torch.Generator().manual_seed(1))
    lengths, prompts = torch.tensor([20, 13, 6]), torch.tensor([5, 9, 2])
    position = torch.arange(20)
    attention = (position < lengths[:, None]).long()
    return ids, attention, (position >= prompts[:, None]) & attention.bool()
