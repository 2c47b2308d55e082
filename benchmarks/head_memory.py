"""How much memory do log-probabilities cost, forward and backward, against the float32 logits that they never hold?

    python -m benchmarks.head_memory

A tiny Llama (hidden 32) with a vocabulary of 50,000 scores 2,048 tokens. Printed is the rise of the process's peak
resident memory. Exit status 1 where it is a quarter of the logits or more.
"""

import sys

import torch
import transformers

from openkto.models import Actor
from openkto.report.throughput import peak_memory_gib

TOKENS, VOCABULARY, HIDDEN = 2048, 50_000, 32


def main() -> int:
    """Print the table; return the exit status."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=TOKENS,
    )  # fmt: skip
    actor = Actor(transformers.LlamaForCausalLM(config))
    score(actor, 16)  # loads every kernel and makes the gradients' buffers, which any training has
    before = peak_memory_gib(torch.device("cpu"))
    with torch.no_grad():
        score(actor, TOKENS)
    forward = peak_memory_gib(torch.device("cpu")) - before
    score(actor, TOKENS)
    both = peak_memory_gib(torch.device("cpu")) - before
    logits = TOKENS * VOCABULARY * 4 / 2**30
    print(f"{'':24}{'MiB':>8}{'of the float32 logits':>24}")
    print(f"{'float32 logits':24}{logits * 1024:8.0f}{'100%':>24}")
    print(f"{'forward':24}{forward * 1024:8.0f}{forward / logits:24.0%}")
    print(f"{'forward and backward':24}{both * 1024:8.0f}{both / logits:24.0%}")
    return int(max(forward, both) >= logits / 4)


def score(actor: Actor, tokens: int) -> None:
    """Run one row through the actor, backward too where gradients are on."""
    ids = torch.randint(0, VOCABULARY, (1, tokens))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    log_prob = actor(ids, torch.ones_like(ids), mask).log_prob_B
    if log_prob.requires_grad:
        log_prob.sum().backward()


if __name__ == "__main__":
    sys.exit(main())
