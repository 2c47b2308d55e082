"""What OpenKTO computes over the least possible, in FLOPs: `python -m benchmarks.flops_over_least`.

    python -m benchmarks.flops_over_least [--rows FILE] [--batch 64] [--max_tokens 4096] [--epochs 1 3]

Nothing is trained: counted are the micro-batches that the loader makes for a Llama of 32M parameters on one rank, and
what filling the reference's cache runs. The least possible has each distinct prompt once per model and pass, and each
completion once: a step's pass of the policy, whose mismatched completions need only what its forward on the rows has
computed of the prompts; a step's pass of a reference in the loop; the one pass that fills the cache. Computed, but not
among the least, is also the head, which the backward runs a second time instead of keeping logits.

Rows are those of the demo, drawn ones as long as real ones, and drawn ones of 256 tokens of which prompts have 20%, 50%
and 80%, alone and as two answers to each prompt.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

from benchmarks.material import SMALL, draw_rows, draw_shares, read_rows, read_tokens
from openkto.batches.batch import IntArray
from openkto.batches.loader import KTODataLoader, RankBatch
from openkto.batches.pairs import pairs_by_step, pairs_of_run
from openkto.batches.sharing import sharable_prompts
from openkto.models import Actor
from openkto.report.flops import ForwardWork, StepParts, StepWork, forward_work, row_sizes
from openkto.trainer.planning import plan_for

ROOT = Path(__file__).parent.parent
SHARES = (20, 50, 80)


class Pairs(NamedTuple):
    """What is known of pairs before any layout, [P] each: tokens, those of the prompt, and which prompt that is."""

    lengths_P: Tensor
    prompt_P: Tensor
    key_P: IntArray

    def repeated(self) -> Tensor:
        """Return the tokens of each prompt that has come in a pair before, [P]."""
        _, first = np.unique(self.key_P, return_index=True)
        repeated_P = self.prompt_P.clone()
        repeated_P[torch.from_numpy(first)] = 0
        return repeated_P


def computed(batch: RankBatch, work: StepWork) -> StepParts:
    """Return the FLOPs of a step, by part, as its micro-batches are laid out."""
    parts = work.parts(batch)
    again = sum(work.policy.head_again(scored) for _, scored, _ in row_sizes(batch.matched, ""))
    return parts._replace(matched=parts.matched + again)


def least(loader: KTODataLoader, own_N2: IntArray, pairs_N2: IntArray, batch: RankBatch, work: StepWork) -> StepParts:
    """Return the least FLOPs of a step, by part.

    Args:
        own_N2, pairs_N2: of the batch, whose prompt and whose completion its matched and mismatched pairs have.
    """
    own, mismatched = _pairs(loader, own_N2), _pairs(loader, pairs_N2)
    scored = sum(int(m["loss_mask"].sum()) for m in batch.matched)
    kl_scored = sum(int(m["kl_loss_mask"].sum()) for m in batch.mismatched)
    reference = 0.0
    if work.reference is not None:
        both = _pairs(loader, np.concatenate([own_N2, pairs_N2]))
        reference = work.reference.forward(both.lengths_P, scored + kl_scored, both.repeated())
    return StepParts(
        matched=work.policy.training(own.lengths_P, scored, own.repeated()),
        # Each of these prompts is one of the batch's rows', which its matched forward has run.
        mismatched=work.policy.forward(mismatched.lengths_P, kl_scored, mismatched.prompt_P),
        reference=reference,
    )


def of_epoch(loader: KTODataLoader, work: StepWork) -> tuple[StepParts, StepParts]:
    """Return what an epoch's steps compute, and the least, by part."""
    ours, lowest = StepParts(0.0, 0.0, 0.0), StepParts(0.0, 0.0, 0.0)
    for own_N2, pairs_N2 in pairs_by_step(loader, len(loader)):
        batch = loader.make_batch(own_N2[:, 0])
        ours = _add(ours, computed(batch, work))
        lowest = _add(lowest, least(loader, own_N2, pairs_N2, batch, work))
    return ours, lowest


def of_cache(loader: KTODataLoader, epochs: int, model: ForwardWork) -> tuple[float, float]:
    """Return what filling the reference's cache for a run of so many epochs computes, and the least."""
    pairs_P2 = pairs_of_run(loader, epochs * len(loader))
    sizes = list(row_sizes(loader.of_rank(pairs_P2, loader.plan_pairs(pairs_P2)), ""))
    pairs, scored = _pairs(loader, pairs_P2), sum(scored for _, scored, _ in sizes)
    return sum(model.forward(*one) for one in sizes), model.forward(pairs.lengths_P, scored, pairs.repeated())


def _pairs(loader: KTODataLoader, pairs_P2: IntArray) -> Pairs:
    lengths_P = loader.pair_lengths(pairs_P2[:, 0], pairs_P2[:, 1])
    prompt_P = sharable_prompts(loader.dataset, pairs_P2, lengths_P)
    keys_P = loader.dataset.prompt_keys[pairs_P2[:, 0]]
    return Pairs(torch.from_numpy(lengths_P.astype(np.int64)), torch.from_numpy(prompt_P), keys_P)


def _add(left: StepParts, right: StepParts) -> StepParts:
    return StepParts(*(a + b for a, b in zip(left, right, strict=True)))


def row_sets(args: argparse.Namespace) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the rows to count, by name."""
    if args.rows is not None:
        yield args.rows.name, read_rows(args.rows)
    yield "the demo's", read_rows(ROOT / "examples/kto_train.jsonl")
    yield "drawn, as long as real ones", draw_rows(args.count)
    for answers in (1, 2):
        for share in SHARES:
            more = "" if answers == 1 else f", {answers} answers to each"
            yield f"drawn, prompts {share}%{more}", draw_shares(args.count, args.tokens, share / 100, answers)


def header(epochs: list[int]) -> str:
    """Return the table's first lines."""
    titles = ["rows", "policy, matched, with gradient", "policy, mismatched", "reference in the loop"]
    titles += [f"the reference's cache, epochs: {n}" for n in epochs]
    titles += ["**an epoch, reference in the loop**", *(f"**cached, epochs: {n}**" for n in epochs), "GFLOP an epoch"]
    return f"FLOPs computed over the least possible\n\n| {' | '.join(titles)} |\n|{' --- |' * len(titles)}"


def line(name: str, loader: KTODataLoader, work: StepWork, epochs: list[int]) -> str:
    """Return the table's line of these rows: the ratio of each part, of an epoch, and of whole runs with a cache."""
    assert work.reference is not None, "a reference in the loop is counted, too"
    ours, lowest = of_epoch(loader, work)
    caches = {n: of_cache(loader, n, work.reference) for n in epochs}
    policy = ours.matched + ours.mismatched, lowest.matched + lowest.mismatched
    found = [*zip(ours, lowest, strict=True), *caches.values(), (sum(ours), sum(lowest))]
    found += [(n * policy[0] + cache[0], n * policy[1] + cache[1]) for n, cache in caches.items()]
    ratios = " | ".join(f"{computes / could:.3f}" for computes, could in found)
    return f"| {name} | {ratios} | {sum(ours) / 1e9:.0f} |"


def main() -> None:
    """Count each kind of rows and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="JSON lines with prompt, completion (messages) and label, besides")
    parser.add_argument("--count", type=int, default=256, help="drawn rows (%(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="in a drawn row, about (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="rows in a global batch (%(default)s)")
    parser.add_argument("--max_len", type=int, default=2048, help="tokens a row (%(default)s)")
    parser.add_argument("--max_tokens", type=int, default=4096, help="tokens in a micro-batch (%(default)s)")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 3], help="of the runs with a cache (%(default)s)")
    args = parser.parse_args()
    with torch.device("meta"):
        actor = Actor(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)))
    work = StepWork(forward_work(actor), forward_work(actor))
    print(header(args.epochs))
    for name, rows in row_sets(args):
        with tempfile.TemporaryDirectory() as folder:
            data = read_tokens(Path(folder), rows, SMALL["vocab_size"], args.max_len)
            loader = KTODataLoader(data, args.batch, max_tokens_per_micro_batch=args.max_tokens)
            plan_for([loader], actor, reference_runs=True)
            # As where memory holds the graphs of all of a batch's micro-batches.
            loader.layout = replace(loader.layout, held_tokens=args.batch * args.max_len)
            print(line(name, loader, work, args.epochs), flush=True)


if __name__ == "__main__":
    main()
