"""Answers of the policy to prompts, a greedy and a sampled one to each, by transformers' own `generate`.

Shapes:  R = prompts, T = the longest prompt, V = vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from openkto.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How answers are made.

    `end_ids` are the tokens at which an answer ends; `pad_id` fills the rows that have ended.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    end_ids: tuple[int, ...]
    pad_id: int


class Answers(NamedTuple):
    """The ids of the answers to one prompt, each with the token that ended it, where one did."""

    greedy: list[int]
    sampled: list[int]


@torch.no_grad()
def answer(
    actor: Any,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    sampling: Sampling,
    device: torch.device,
    *,
    between: Callable[[], None],
    is_in_step: bool = False,
) -> list[Answers]:
    """Return the answers to each prompt, made in one batch in which every prompt stands twice.

    No global random generator is used. A sampled answer depends on its prompt's seed and on no other prompt.

    Args:
        actor: an `Actor` whose weights are whole, or come by themselves.
        seeds: [R], of the sampled answers.
        between: called before each token.
        is_in_step: run as many forwards as the rank with the longest answer does.

    Raises:
        ConfigError: the model does not generate.
    """
    model, noise = actor.language_model, _Noise(seeds, sampling, device, between)
    if not model.can_generate():
        raise ConfigError(
            f"--num_samples, --sample_prompts: need a model that generates; got {type(model).__name__}, which does "
            "not. Leave them out."
        )
    longest = max(map(len, prompts))
    rows = [[sampling.pad_id] * (longest - len(ids)) + ids for ids in prompts]
    masks = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    ids_RT, mask_RT = (torch.tensor(lines + lines, device=device) for lines in (rows, masks))
    known = model.generation_config
    # What the model's own configuration has besides its end tokens (penalties, beams, a temperature) is not the policy.
    model.generation_config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,
        eos_token_id=list(sampling.end_ids) or None,
        pad_token_id=sampling.pad_id,
    )
    try:
        # Uncompiled: what torch.compile makes of these shapes would be of no further use.
        with torch.compiler.set_stance("force_eager"), actor.as_loaded():
            made_RT = model.generate(
                input_ids=ids_RT,
                attention_mask=mask_RT,
                logits_processor=LogitsProcessorList([noise]),
                synced_gpus=is_in_step,
            )
    finally:
        model.generation_config = known
    answers = [_until_end(line, sampling.end_ids) for line in made_RT[:, longest:].tolist()]
    return [Answers(*pair) for pair in zip(answers[: len(prompts)], answers[len(prompts) :], strict=True)]


def _until_end(ids: list[int], end_ids: tuple[int, ...]) -> list[int]:
    """Return the ids up to the first that ends an answer, that one included."""
    end = next((i for i, token_id in enumerate(ids) if token_id in end_ids), len(ids) - 1)
    return ids[: end + 1]


class _Noise(LogitsProcessor):
    """Turns the lower half of a batch, which is decoded greedily, into samples.

    The largest of log p + g, with g from a Gumbel distribution, is distributed as p. So each row can have a generator
    of its own, where `torch.multinomial` has one for the whole batch.
    Source: Maddison, Tarlow, Minka: A* Sampling, arXiv:1411.0030, section 2.
    """

    def __init__(
        self, seeds: Sequence[int], sampling: Sampling, device: torch.device, between: Callable[[], None]
    ) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(sampling.temperature)]
        self._warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        self._between = between

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._between()
        greedy_RV, sampled_RV = scores.float().chunk(2)
        for warper in self._warpers:
            sampled_RV = warper(input_ids, sampled_RV)
        waits = [
            torch.empty(scores.shape[1], device=scores.device).exponential_(generator=generator)
            for generator in self._generators
        ]
        gumbel_RV = -torch.stack(waits).clamp_min(torch.finfo(torch.float32).tiny).log()
        return torch.cat([greedy_RV, sampled_RV + gumbel_RV])
