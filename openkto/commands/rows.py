"""The tokenizer and the rows of a configuration; this needs neither a model's weights nor DeepSpeed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from openkto.config import DataConfig, RunConfig, settings_for
from openkto.config.data_checks import label_meanings, template_kwargs
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.holdout import RowChoice
from openkto.data.row import RowSettings
from openkto.data.sources import SourceSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer_of(config: RunConfig, pretrain: str) -> "PreTrainedTokenizerBase":
    """Return the model's tokenizer."""
    # transformers imports torch with its tokenizers; reading rows with one needs neither.
    from openkto.models.loading import load_tokenizer

    tokenizer: PreTrainedTokenizerBase = load_tokenizer(
        pretrain,
        use_fast=not config.model.disable_fast_tokenizer,
        trust_remote_code=config.model.trust_remote_code,
    )
    return tokenizer


def row_settings(data: DataConfig) -> RowSettings:
    """Return how records are read, with what the settings say as text in values."""
    read_from_text = {
        "label_map": label_meanings("--label_map", data.label_map),
        "label_threshold": tuple(data.label_threshold or ()),
        "chat_template_kwargs": template_kwargs("--chat_template_kwargs", data.chat_template_kwargs),
    }
    return RowSettings(**settings_for(RowSettings, data) | read_from_text)


def source_settings(data: DataConfig, split: str, choice: RowChoice | None = None) -> SourceSettings:
    """Return which rows of the sources are read."""
    return SourceSettings(split, data.dataset_config, data.dataset_revision, data.max_samples, choice)


def read_rows(
    sources: list[str],
    split: str,
    config: RunConfig,
    tokenizer: Any,
    probs: list[float] | None,
    end_token_ids: Sequence[int],
    choice: RowChoice | None = None,
    **more: Any,
) -> UnpairedPreferenceDataset:
    """Return the rows of the sources; `more` are arguments that no setting has, or that override one."""
    data = config.data
    settings = settings_for(UnpairedPreferenceDataset, data) | {"dataset_probs": probs}
    return UnpairedPreferenceDataset(
        sources,
        tokenizer,
        row_settings=row_settings(data),
        source_settings=source_settings(data, split, choice),
        cache_dir=data.data_cache_dir,
        seed=config.train.seed,
        end_token_ids=end_token_ids,
        **(settings | more),
    )
