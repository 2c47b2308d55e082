"""Answers of the policy to a few prompts, while it trains: what samples.jsonl holds.

They take nothing from training: weights, generators, the model's mode and DeepSpeed's order of gathering stay as they
are.
"""

from collections.abc import Callable
from typing import Any

from openkto.data.prompts import Prompt
from openkto.models.generation import Answers, Sampling, answer
from openkto.process.watchdog import Watchdog
from openkto.trainer.protocols import TrainingStrategy

Line = dict[str, Any]

PROMPTS_AT_ONCE = 16  # each stands twice in a batch


class Samples:
    """The prompts of a run and how they are answered.

    A prompt's answers depend on the policy and on `seed`, not on step or ranks: where a sampled answer changes from
    step to step, the policy did.

    Args:
        prompts: in the order in which they are written down.
        tokenizer: decodes the answers.
    """

    def __init__(self, prompts: list[Prompt], sampling: Sampling, tokenizer: Any, seed: int) -> None:
        self._prompts, self._sampling, self._tokenizer, self._seed = prompts, sampling, tokenizer, seed

    def take(
        self, engine: Any, strategy: TrainingStrategy, watchdog: Watchdog, between: Callable[[], None]
    ) -> list[Line]:
        """Return a line for each prompt, the same on every rank; all ranks must call it.

        Each rank answers the same number of prompts; where they do not divide evenly, some are answered twice.

        Args:
            watchdog: told of each token.
            between: called before each batch, as often on every rank.
        """
        count, ranks = len(self._prompts), strategy.data_size
        own = [i % count for i in range(strategy.data_rank, -(-count // ranks) * ranks, ranks)]
        made: dict[int, Answers] = {}
        for start in range(0, len(own), PROMPTS_AT_ONCE):
            between()
            batch = own[start : start + PROMPTS_AT_ONCE]
            with strategy.weights_for_generation(engine):
                found = answer(
                    engine.module,
                    [self._prompts[i].ids for i in batch],
                    [self._seed + i for i in batch],
                    self._sampling,
                    strategy.device,
                    between=watchdog.beat,
                    is_in_step=strategy.zero_stage == 3,
                )
            made |= dict(zip(batch, found, strict=True))
        for others in strategy.gather_objects(made):
            made |= others
        return [self._line(i, prompt, made[i]) for i, prompt in enumerate(self._prompts)]

    def _line(self, number: int, prompt: Prompt, answers: Answers) -> Line:
        line: Line = {"sample": number, "source": prompt.source, "prompt": self._text(prompt.ids)}
        for kind, ids in zip(Answers._fields, answers, strict=True):
            is_finished = bool(ids) and ids[-1] in self._sampling.end_ids
            line |= {kind: self._text(ids[: len(ids) - is_finished]), f"{kind}_finished": is_finished}
        if prompt.label is not None:
            ids = list(prompt.completion_ids)
            line |= {"completion": self._text(ids[: len(ids) - (ids[-1] in self._sampling.end_ids)])}
            line |= {"label": prompt.label}
        return line

    def _text(self, ids: list[int]) -> str:
        """Return text with special tokens as they are written in templates."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
