"""The learning rate is a pure function of the update's number."""

import math

import pytest
import torch

from openkto.config import LR_SCHEDULERS
from openkto.errors import ConfigError
from openkto.trainer.schedule import create_scheduler, learning_rates


def rates(name, total=20, warmup_ratio=0.2, min_lr_ratio=0.1):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = create_scheduler(
        optimizer, name, total_steps=total, warmup_ratio=warmup_ratio, min_lr_ratio=min_lr_ratio
    )
    return [learning_rates(scheduler, update)[0] for update in range(1, total + 1)]


@pytest.mark.parametrize("name", LR_SCHEDULERS)
def test_every_schedule_works_and_reading_it_twice_gives_the_same(name):
    first = rates(name)
    assert first == rates(name)
    assert all(0 <= rate <= 1 for rate in first)
    assert max(first) > 0.9


def test_warm_up_gives_the_share_of_its_steps_from_step_one():
    assert rates("cosine_with_min_lr")[:4] == [0.25, 0.5, 0.75, 1.0]


def test_the_last_step_has_the_final_value():
    assert rates("linear")[-1] == 0.0
    assert rates("cosine_with_min_lr")[-1] == pytest.approx(0.1)
    assert rates("polynomial")[-1] == pytest.approx(0.1)


def test_the_cosine_between_is_a_cosine():
    middle = rates("cosine_with_min_lr")[11]  # step 12 of 20, half of the 16 after warm-up
    assert middle == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))


def test_a_schedule_that_needs_a_metric_is_refused():
    with pytest.raises(ConfigError, match="must be a function of the step; got reduce_lr_on_plateau"):
        rates("reduce_lr_on_plateau")
