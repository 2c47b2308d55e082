"""A default that stands twice, in a setting and in what the library's own users call, is the same."""

import dataclasses
import inspect

import pytest

from openkto.batches.loader import KTODataLoader
from openkto.config import settings
from openkto.data.dataset import UnpairedPreferenceDataset
from openkto.data.row import RowSettings
from openkto.data.sources import SourceSettings
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.distributed.zero_options import ZeroOptions
from openkto.models import Actor
from openkto.models.loss import KTOLoss
from openkto.trainer import FitArgs, KTOTrainer

# Where a caller of the library gives something else, or nothing, by another default: the setting's stands in the flags.
OTHER = {
    KTODataLoader: set(),
    UnpairedPreferenceDataset: set(),
    SourceSettings: set(),
    RowSettings: {"chat_template_kwargs", "label_map", "label_threshold"},  # read from text
    DeepspeedStrategy: {
        "grad_accum_dtype",  # the setting's None is fp32
        *("train_batch_size", "micro_train_batch_size"),  # compared with a file of DeepSpeed's only
    },
    KTOTrainer: {"export_dtype"},  # torch's
    FitArgs: set(),
    ZeroOptions: set(),
    KTOLoss: set(),
    Actor: set(),
}


@pytest.mark.parametrize("takes", OTHER, ids=lambda takes: takes.__name__)
def test_a_default_of_the_library_is_the_settings(takes):
    parameters = inspect.signature(takes).parameters.values()
    named = {one.name: one.default for one in parameters if one.name in settings() and one.default is not one.empty}
    assert named, "it takes settings by their names"
    own = dataclasses.fields(takes) if dataclasses.is_dataclass(takes) else ()
    named |= {one.name: one.default_factory() for one in own if one.name in named and callable(one.default_factory)}
    for name in named.keys() - OTHER[takes]:
        item = settings()[name]
        default = item.default_factory() if callable(item.default_factory) else item.default
        assert named[name] == default, name
    for flag, field in (
        ("desirable_loss_weight", "desirable_weight"),
        ("undesirable_loss_weight", "undesirable_weight"),
    ):
        assert settings()[flag].default == inspect.signature(KTOLoss).parameters[field].default
