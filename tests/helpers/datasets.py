"""Makes data sets whose settings a test gives by their names only."""

from dataclasses import fields
from typing import Any

from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.row import RowSettings
from openkto.data.sources import SourceSettings


def dataset_of(source: Any, tokenizer: Any, max_len: int = 512, **settings: Any) -> UnpairedPreferenceDataset:
    """Return the data set, with each setting handed to the value that has a field of its name."""
    values = {"row_settings": RowSettings, "source_settings": SourceSettings}
    given = {
        name: {field.name: settings.pop(field.name) for field in fields(value) if field.name in settings}
        for name, value in values.items()
    }
    made = {name: value(**given[name]) for name, value in values.items()}
    return UnpairedPreferenceDataset(source, tokenizer, max_len, **made, **settings)
