"""What shared prompts save: `python -m benchmarks.share_prompts`.

A step's forwards of the reference (matched and mismatched pairs), and the policy's whole step with its backward,
planned as a run plans them, with `--share_prompts` off and on in turn, in one process of one CPU thread. Rows are
drawn: their prompts have 20%, 50% and 80% of the tokens, alone or as pairs of two answers to each prompt.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.material import SMALL, draw_shares, read_tokens
from openkto.batches.loader import KTODataLoader, RankBatch
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.models import Actor
from openkto.models.loss import KTOLoss
from openkto.trainer.forwards import forward_all, forward_before_backward, forward_with_gradient, strip_prefix
from openkto.trainer.planning import plan_for
from openkto.trainer.rows import part_of_loss

SHARES = (20, 50, 80)  # percent
# Rewards against `NoReference` stay near 1: gradients of far larger ones are subnormal numbers, which are slow.
LOSS = KTOLoss(beta=1e-3)


def make_batch(rows: UnpairedPreferenceDataset, actor: Actor, *, shares: bool, max_tokens: int) -> RankBatch:
    """Return all rows as one batch that trains; the graphs of all its micro-batches may be held."""
    loader = KTODataLoader(rows, len(rows), max_tokens_per_micro_batch=max_tokens)
    plan_for([loader], actor)
    held_tokens = int((rows.prompt_lengths + rows.completion_lengths).sum()) if shares else None
    loader.layout = replace(loader.layout, shares_prompts=shares, shares_pairs=shares, held_tokens=held_tokens)
    return next(iter(loader))


class OneRank:
    """What forwards ask of a strategy, in one process."""

    device = torch.device("cpu")

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Return them: there are no others."""
        return values


class NoReference:
    """A reference without a forward, as a cache is."""

    def log_probs(self, micro_batches: list[dict[str, torch.Tensor]], *_: Any, **__: Any) -> list[torch.Tensor]:
        """Return zeros."""
        return [torch.zeros(len(m["input_ids"]), dtype=torch.float64) for m in micro_batches]


def reference_forwards(actor: Actor, batch: RankBatch) -> float:
    """Run the reference's forwards of a step; return the sum of their log-probabilities."""
    whole = [*map(strip_prefix, batch.mismatched), *batch.matched]
    with torch.no_grad():
        found = forward_all(actor.eval(), batch.shared or whole, torch.device("cpu"), lambda: None)
    return float(torch.cat(found).sum())


def policy_step(actor: Actor, batch: RankBatch) -> float:
    """Run the policy's forwards and backwards of a step; return the loss."""
    total = 0.0
    before = forward_before_backward(actor, NoReference(), OneRank(), LOSS, batch, lambda: None, 0.0, False)
    actor.train()
    for micro_batch, ref_log_prob in zip(batch.matched, before.ref_log_prob, strict=True):
        if not before.outputs:
            before.outputs.append(forward_with_gradient(actor, LOSS, micro_batch, False))
        part = part_of_loss(LOSS, batch, micro_batch, before.outputs.pop(0), ref_log_prob, before)
        part.loss.backward()
        total += float(part.loss.detach())
    actor.zero_grad()
    return total


def tokens_of(name: str, batch: RankBatch) -> int:
    """Return the tokens that run forward."""
    if name == "the policy's step":
        return batch.matched_tokens + batch.mismatched_tokens
    return sum(len(m["token_index"]) for m in batch.shared) or 2 * batch.matched_tokens


WORK: dict[str, Callable[[Actor, RankBatch], float]] = {
    "the reference's forwards": reference_forwards,
    "the policy's step": policy_step,
}


def main() -> None:
    """Measure each kind of rows and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16, help="rows in the batch (%(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens a row, about (%(default)s)")
    parser.add_argument("--max_tokens", type=int, default=2048, help="tokens in a micro-batch (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement, off and on in turn (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    actor = Actor(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 3}))).eval()
    actor.run_on(torch.device("cpu"))
    print("| prompts | answers to each | what runs | tokens, on over off | seconds off | seconds on | off over on |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for answers in (1, 2):
        for share in SHARES:
            with tempfile.TemporaryDirectory() as folder:
                drawn = draw_shares(args.rows, args.tokens, share / 100, answers)
                rows = read_tokens(Path(folder), drawn, SMALL["vocab_size"], 4 * args.tokens)
                off, on = (
                    make_batch(rows, actor, shares=shares, max_tokens=args.max_tokens) for shares in (False, True)
                )
            assert on.reuses_prompts, "--max_tokens leaves no room for a micro-batch's mismatched pairs"
            for name, work in WORK.items():
                seconds: list[list[float]] = [[], []]
                for _ in range(args.repeats):
                    totals = []
                    for batch, found in zip((off, on), seconds, strict=True):
                        started = time.process_time()
                        totals.append(work(actor, batch))
                        found.append(time.process_time() - started)
                    assert abs(totals[0] - totals[1]) <= 1e-5 * abs(totals[0]), totals
                a, b = map(statistics.median, seconds)
                tokens = tokens_of(name, on) / tokens_of(name, off)
                print(f"| {share}% | {answers} | {name} | {tokens:.2f} | {a:.2f} | {b:.2f} | {a / b:.2f} |", flush=True)


if __name__ == "__main__":
    main()
