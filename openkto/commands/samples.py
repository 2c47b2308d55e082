"""The prompts that a run's policy answers while it trains."""

import logging
from typing import Any

from openkto.commands.build import Models
from openkto.commands.data import stops_of_model
from openkto.commands.rows import row_settings
from openkto.config import RunConfig
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.prompts import Prompt, fit_prompts, prompts_of_file, prompts_of_set
from openkto.data.template import ChatTemplate
from openkto.data.tokenize import choose_pad_token
from openkto.distributed.agreement import on_some_ranks
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.models.generation import Sampling
from openkto.trainer.samples import Samples

log = logging.getLogger(__name__)


def choose_prompts(
    config: RunConfig, tokenizer: Any, eval_rows: dict[str, UnpairedPreferenceDataset]
) -> tuple[list[Prompt], int]:
    """Return the prompts, those of the file first, and how long their answers may be, in tokens.

    Raises DataError where a prompt cannot be read, or none leaves room for an answer.
    """
    samples, data = config.samples, config.data
    if not samples.takes_samples:
        return [], 0
    prompts = []
    if samples.sample_prompts is not None:
        prompts += prompts_of_file(samples.sample_prompts, tokenizer, row_settings(data), data.template_date)
    for i, (name, rows) in enumerate(eval_rows.items()):
        # Of 5 prompts and 2 sets, the first gets 3.
        prompts += prompts_of_set(name, rows, (samples.num_samples + len(eval_rows) - 1 - i) // len(eval_rows))
    kept, room = fit_prompts(
        prompts,
        max_len=data.max_len,
        max_new_tokens=samples.sample_max_new_tokens,
        truncation=data.truncation,  # type: ignore[arg-type]
        bos_id=tokenizer.bos_token_id,
    )
    log.info("samples: %d prompts, with answers of at most %d tokens, go to samples.jsonl", len(kept), room)
    return kept, room


def make_samples(
    config: RunConfig,
    strategy: DeepspeedStrategy,
    tokenizer: Any,
    models: Models,
    eval_rows: dict[str, UnpairedPreferenceDataset],
    taught_stops: list[int],
) -> Samples | None:
    """Return what the run's policy is to answer, the same on every rank; None where nothing is asked for.

    Answers end where those of the saved model do, and where the chat template ends one. All ranks must call it.

    Raises DataError as `choose_prompts`.
    """
    if not config.samples.takes_samples:
        return None
    found = on_some_ranks(strategy, lambda: choose_prompts(config, tokenizer, eval_rows), is_mine=strategy.rank == 0)
    prompts, room = strategy.gather_objects(found)[0]
    template = ChatTemplate(tokenizer)
    ends = {*stops_of_model(models.policy, config.model.trust_remote_code), *taught_stops}
    ends |= {tokenizer.eos_token_id} - {None} | (template.end_ids if template.exists else frozenset())
    sampling = Sampling(
        max_new_tokens=room,
        temperature=config.samples.sample_temperature,
        top_p=config.samples.sample_top_p,
        end_ids=tuple(sorted(ends)),
        pad_id=choose_pad_token(tokenizer)[0],
    )
    return Samples(prompts, sampling, tokenizer, config.train.seed)
