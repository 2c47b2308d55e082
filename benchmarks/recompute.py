"""What gradient checkpointing costs and saves: `python -m benchmarks.recompute`.

A Llama of 30M parameters on one CPU thread; each kind in a process of its own, for its largest memory.
"""

import argparse
import multiprocessing
import resource
import statistics
import time
from typing import Any

KINDS: dict[str, bool | str] = {"none": False, "selective": "selective", "whole": True}


def measure(how: bool | str, rows: int, tokens: int, steps: int, results: Any) -> None:
    """Put (seconds a step, MiB that the steps took beyond the model) into `results`."""
    import torch
    import transformers

    from openkto.models import Actor

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=tokens, tie_word_embeddings=True,
    )  # fmt: skip
    actor = Actor(transformers.LlamaForCausalLM(config), gradient_checkpointing=how).train()
    ids_BT = torch.randint(3, 8192, (rows, tokens))
    mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    mask_BT[:, tokens // 2 :] = True
    for parameter in actor.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(steps):
        started = time.perf_counter()
        actor(ids_BT, torch.ones_like(ids_BT), mask_BT).log_prob_B.sum().backward()
        seconds.append(time.perf_counter() - started)
    results.put((statistics.median(seconds), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def main() -> None:
    """Measure each kind in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    found = {}
    for name, how in KINDS.items():
        results = context.Queue()
        process = context.Process(target=measure, args=(how, args.rows, args.tokens, args.steps, results))
        process.start()
        found[name] = results.get()
        process.join()
    print(f"\nforward and backward of {args.rows} rows of {args.tokens} tokens, float32, one thread\n")
    print("| checkpointing | s a step | of none | MiB beyond the model | of none |\n| --- | --- | --- | --- | --- |")
    for name, (seconds, memory) in found.items():
        ratios = seconds / found["none"][0], memory / found["none"][1]
        print(f"| {name} | {seconds:.2f} | {ratios[0]:.2f} | {memory:.0f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
