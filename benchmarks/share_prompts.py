"""What shared prompts save: `python -m benchmarks.share_prompts`.

A step's forwards of the reference (matched and mismatched pairs) and of the policy's mismatched pairs, planned as a run
plans them, with `--share_prompts` off and on in turn, in one process of one CPU thread. Rows are drawn: their prompts
have 20%, 50% and 80% of the tokens, alone or as pairs of two answers to each prompt.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from benchmarks.material import SMALL, draw_shares, read_tokens
from openkto.batches.loader import KTODataLoader, RankBatch
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.models import Actor
from openkto.trainer.forwards import forward_all, strip_prefix
from openkto.trainer.planning import plan_for

SHARES = (20, 50, 80)  # percent


def make_batch(rows: UnpairedPreferenceDataset, actor: Actor, *, shares: bool, max_tokens: int) -> RankBatch:
    """Return all rows as one batch that trains."""
    loader = KTODataLoader(rows, len(rows), max_tokens_per_micro_batch=max_tokens)
    plan_for([loader], actor)
    loader.layout = replace(loader.layout, shares_prompts=shares, shares_pairs=shares)
    return next(iter(loader))


def run(actor: Actor, micro_batches: list[dict[str, torch.Tensor]]) -> tuple[float, float]:
    """Return the processor's seconds of these forwards, and the sum of their log-probabilities."""
    started = time.process_time()
    found = forward_all(actor, micro_batches, torch.device("cpu"), lambda: None)
    return time.process_time() - started, float(torch.cat(found).sum())


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
    print("| prompts | answers to each | forwards | tokens, on over off | seconds off | seconds on | off over on |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with torch.no_grad():
        for answers in (1, 2):
            for share in SHARES:
                with tempfile.TemporaryDirectory() as folder:
                    drawn = draw_shares(args.rows, args.tokens, share / 100, answers)
                    rows = read_tokens(Path(folder), drawn, SMALL["vocab_size"], 4 * args.tokens)
                    off, on = (
                        make_batch(rows, actor, shares=shares, max_tokens=args.max_tokens) for shares in (False, True)
                    )
                policy = [[strip_prefix(m) for m in batch.mismatched] for batch in (off, on)]
                kinds = {"the reference's": ([*policy[0], *off.matched], on.shared or [*policy[1], *on.matched])}
                if answers > 1:
                    kinds["the policy's mismatched"] = (policy[0], policy[1])
                for name, sides in kinds.items():
                    tokens = [sum(len(m["token_index"]) for m in side) for side in sides]
                    seconds: list[list[float]] = [[], []]
                    for _ in range(args.repeats):
                        totals = []
                        for side, found in zip(sides, seconds, strict=True):
                            own, total = run(actor, side)
                            found.append(own)
                            totals.append(total)
                        assert abs(totals[0] - totals[1]) <= 1e-6 * abs(totals[0]), totals
                    a, b = map(statistics.median, seconds)
                    print(
                        f"| {share}% | {answers} | {name} | {tokens[1] / tokens[0]:.2f} | {a:.2f} | {b:.2f} | "
                        f"{a / b:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
