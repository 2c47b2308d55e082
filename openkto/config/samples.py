"""Settings of the answers that the policy is asked for during training."""

from __future__ import annotations

from dataclasses import dataclass

from openkto.config.option import LARGE, option


@dataclass(frozen=True)
class SamplesConfig:
    num_samples: int = option(
        0,
        "let the model answer N prompts of the evaluation sets before training, at each evaluation and at the end, and "
        "write the answers to samples.jsonl; the prompts are spread evenly over each set. Training does not change",
        "prompts",
        at_least=0,
        below=LARGE,
        default_text="0: none",
        train_only=True,
    )
    sample_prompts: str | None = option(
        None,
        "also let it answer the prompts of this file: a .txt file with a prompt on each line, or rows as --dataset "
        "takes them, which need only a prompt",
        is_path=True,
        default_text="none",
        train_only=True,
        may_differ=True,
    )
    sample_max_new_tokens: int = option(
        256,
        "the longest answer to these prompts; prompt and answer together also stay within --max_len",
        "tokens",
        at_least=1,
        below=LARGE,
        train_only=True,
    )
    sample_temperature: float = option(
        0.7,
        "temperature of the sampled answers; a greedy one stands next to each",
        above=0,
        below=LARGE,
        train_only=True,
    )
    sample_top_p: float = option(
        0.9,
        "sample only from the most likely tokens that together have this probability; 1 is all of them",
        "probability",
        above=0,
        at_most=1,
        train_only=True,
    )

    @property
    def takes_samples(self) -> bool:
        """Whether any answers are asked for."""
        return self.num_samples > 0 or self.sample_prompts is not None
