"""The cache by itself: its keys, its values against float64, what a loss without z_ref needs, memory given back."""

import contextlib
import gc
import os
import signal

import numpy as np
import pytest
import torch

from openkto.batches import plan
from openkto.batches.loader import KTODataLoader
from openkto.batches.micro_batch import cut_pairs
from openkto.batches.pairs import batch_keys, pairs_of_run, sequence_key
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.errors import StopError
from openkto.models import Actor
from openkto.process.stops import StopRequest
from openkto.trainer import reference_cache
from openkto.trainer.reference_cache import ReferenceCache
from tests.ranks import run_ranks
from tests.tiny import tiny_llama, token_rows

LABELS = [True, False, True, True, False, False, True, False, True, False, False]


def test_the_pairs_of_a_run_are_those_that_the_loader_yields():
    rows = token_rows(LABELS, 3)
    for needs in (True, False):
        loader = KTODataLoader(rows, 4, 2, seed=5, needs_mismatched=needs)
        for steps in (1, 4, 7):
            seen, walk = set(), KTODataLoader(rows, 4, 2, seed=5, needs_mismatched=needs)
            batches = [batch for _ in range(3) for batch in walk][:steps]
            for batch in batches:
                seen |= {(row, row) for row in batch.rows.tolist()}
                if needs:
                    seen |= set(zip(batch.rows.tolist(), batch.kl_rows.tolist(), strict=True))
            assert {tuple(pair) for pair in pairs_of_run(loader, steps).tolist()} == seen


def test_a_key_tells_everything_that_the_number_depends_on_and_no_padding():
    key = sequence_key([5, 6], [7, 8], [True, True])
    assert key == sequence_key([5], [6, 7, 8], [False, True, True])  # the same tokens, the same scored
    others = [
        sequence_key([5, 6], [7, 9], [True, True]),
        sequence_key([5, 6], [7, 8], [False, True]),
        sequence_key([5], [6, 7, 8], [True, True, True]),
        sequence_key([5, 6], [7], [True]),
        sequence_key([5, 6], [7, 8, 0], [True, True, False]),
    ]
    assert len({key, *others}) == 6
    rows = token_rows(LABELS, 3)
    pairs = np.array([[0, 1], [4, 2], [3, 3]])
    assert batch_keys(KTODataLoader(rows, 4).micro_batch(pairs, np.zeros(len(pairs), dtype=np.int64))) == [
        sequence_key(*sequence) for sequence in cut_pairs(rows, pairs)
    ]


def fill(folder, zero_stage):
    """Fill a cache; return its values, and the elements of all floating tensors that are left."""
    strategy = DeepspeedStrategy(zero_stage=zero_stage, param_dtype="fp32")
    if zero_stage == 3:
        strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    strategy.setup_distributed()
    before = held()
    place = {"rank": strategy.rank, "world_size": strategy.world_size}
    loader = KTODataLoader(token_rows(LABELS, 3), 4, 2, seed=5, **place)
    cache = ReferenceCache(folder, {}, strategy, [loader], 6)
    cache.look_up()
    with strategy.model_loading():
        actor = Actor(tiny_llama())
    size = sum(parameter.numel() for parameter in actor.parameters())
    with strategy.passing_model(actor) as model:
        cache.fill(model, lambda: None, StopRequest())
        assert held() - before >= 0.5 * size
    assert held() - before < 0.1 * size
    assert cache.num_missing == 0
    return cache.values


def held() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.is_floating_point():
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes() // thing.element_size()
    return sum(storages.values())


@pytest.mark.parametrize(("zero_stage", "world_size"), [(0, 1), (2, 2), (3, 2)])
def test_the_values_are_the_models_on_every_rank_and_its_memory_is_given_back(zero_stage, world_size, tmp_path):
    values, *others = run_ranks(fill, world_size, tmp_path, tmp_path / "ref", zero_stage)
    assert all(other == values for other in others)
    rows, model = token_rows(LABELS, 3), tiny_llama().double()
    pairs = pairs_of_run(KTODataLoader(rows, 4, 2, seed=5), 6)
    assert len(values) == len(pairs) > 22
    for prompt, completion, mask in cut_pairs(rows, pairs):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
        expected = float(log_probs[len(prompt) - 1 :].sum())
        assert values[sequence_key(prompt, completion, mask)] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def fill_until_a_signal(folder):
    """Fill a cache whose rank 1 gets a SIGTERM at its tenth forward; return what was said, and what is on the disk."""
    strategy = DeepspeedStrategy(param_dtype="fp32")
    strategy.setup_distributed()
    place = {"rank": strategy.rank, "world_size": strategy.world_size}
    loader = KTODataLoader(token_rows(LABELS * 4, 3), 4, 1, seed=5, **place)
    cache = ReferenceCache(folder, {}, strategy, [loader], 20)
    cache.look_up()
    forwards = 0

    def between():
        nonlocal forwards
        forwards += 1
        if forwards == 10 and strategy.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    model = strategy.prepare_frozen(Actor(tiny_llama()))
    with StopRequest() as stop:
        try:
            with stop.noting("after a few micro-batches"):
                cache.fill(model, between, stop)
        except StopError as error:
            return str(error), forwards, len(ReferenceCache(folder, {}, strategy, [loader], 20).values)
    return "not stopped", forwards, 0


def test_a_signal_to_one_rank_ends_the_filling_on_all_and_loses_nothing(tmp_path):
    first, second = run_ranks(fill_until_a_signal, 2, tmp_path, tmp_path / "ref", timeout=60)
    assert first == second
    said, forwards, kept = first
    assert said == (
        f"SIGTERM on rank 1: the reference's cache is not complete yet; what was computed is kept in {tmp_path}/ref. "
        "Start the same command again."
    )
    assert forwards == 16  # two exchanges of eight
    assert kept == 32


def fill_in_parts(folder, zero_stage, stops):
    """Fill a cache that holds a shorter run's values, stopped after so many micro-batches in each start.

    Return the values, and the keys of each micro-batch that was run.
    """
    forward, together = reference_cache._forward, []

    def noting(model, strategy, batches, between):
        together.extend(sorted(batch_keys(batch)) for batch in batches if int(batch["row"].min()) >= 0)
        return forward(model, strategy, batches, between)

    reference_cache._forward = noting
    plan.ROWS_AT_A_TIME = 40  # as where there are thousands of pairs
    strategy = DeepspeedStrategy(zero_stage=zero_stage, param_dtype="fp32")
    strategy.setup_distributed()
    place = {"rank": strategy.rank, "world_size": strategy.world_size}
    model = strategy.prepare_frozen(Actor(tiny_llama()))
    for steps, last in ((2, None), *((20, last) for last in (*stops, None))):
        loader = KTODataLoader(token_rows(LABELS * 4, 3), 4, 3, seed=5, packed=True, **place)
        cache = ReferenceCache(folder, {}, strategy, [loader], steps)
        cache.look_up()
        stop, forwards = StopRequest(), iter(range(1, 1000))

        def between(last=last, stop=stop, forwards=forwards):
            if next(forwards) == last:
                stop.reason = "SIGTERM"

        with contextlib.nullcontext() if last is None else pytest.raises(StopError):
            cache.fill(model, between, stop)
    return cache.values, sorted(together)


@pytest.mark.parametrize(("zero_stage", "world_size"), [(0, 1), (2, 2)])
def test_a_fill_that_was_stopped_goes_on_to_the_same_bits(zero_stage, world_size, tmp_path):
    whole, *_ = run_ranks(fill_in_parts, world_size, tmp_path, tmp_path / "whole", zero_stage, ())
    cut, *_ = run_ranks(fill_in_parts, world_size, tmp_path, tmp_path / "cut", zero_stage, (3, 9))
    # The same pairs together in a micro-batch, since that decides the last bits, and none of them twice.
    assert cut == whole
    assert not list((tmp_path / "cut").glob("*.keys"))
