"""The learning rate is a pure function of the update's number."""

import math

import pytest
import torch

from openkto.config import LR_SCHEDULERS
from openkto.errors import ConfigError
from openkto.trainer.schedule import create_scheduler, learning_rates, rates_of_run


def rates(name, total=20, warmup_ratio=0.2, min_lr_ratio=0.1):
    return rates_of_run(1.0, name, total_steps=total, warmup_ratio=warmup_ratio, min_lr_ratio=min_lr_ratio)


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


@pytest.mark.parametrize("name", ["cosine_with_min_lr", "cosine_warmup_with_min_lr"])
def test_both_cosines_with_a_floor_warm_up_from_step_one_and_end_at_the_floor(name):
    assert rates(name, total=6, warmup_ratio=0.5) == pytest.approx([1 / 3, 2 / 3, 1, 0.775, 0.325, 0.1])


@pytest.mark.parametrize("name", LR_SCHEDULERS)
@pytest.mark.parametrize(("total", "warmup_ratio"), [(1, 0.03), (4, 0.9)])
def test_a_run_that_is_all_warm_up_ends_at_the_full_rate(name, total, warmup_ratio):
    assert rates(name, total, warmup_ratio)[-1] == 1.0


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts"])
def test_schedules_without_a_floor_spend_their_last_step_at_rate_0(name):
    assert rates(name, total=4, warmup_ratio=0)[-1] == 0.0
    assert rates(name, total=1, warmup_ratio=0) == [0.0]


def test_the_rates_of_a_run_are_those_that_the_trainer_reads():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2e-5)
    scheduler = create_scheduler(optimizer, "polynomial", total_steps=5, warmup_ratio=0.3, min_lr_ratio=0.2)
    planned = rates_of_run(2e-5, "polynomial", total_steps=5, warmup_ratio=0.3, min_lr_ratio=0.2)
    assert planned == [learning_rates(scheduler, update)[0] for update in range(1, 6)]
    assert planned == pytest.approx([1e-5, 2e-5, 2e-5 * (1 - 0.8 / 3), 2e-5 * (1 - 1.6 / 3), 4e-6])
