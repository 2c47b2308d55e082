"""`--share_prompts` changes what runs and no number: ranks, stages, references, evaluation, a filled cache."""

import logging

import pytest
import torch
import transformers

from openkto.batches.loader import KTODataLoader
from openkto.config import LoraConfig
from openkto.distributed.gather import gather_weights
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.errors import ConfigError
from openkto.models import Actor
from openkto.process.stops import StopRequest
from openkto.report.flops import actor_in
from openkto.trainer.planning import plan_for
from openkto.trainer.reference_cache import ReferenceCache
from tests.helpers.records import lines
from tests.helpers.runs import assert_same
from tests.models.architectures import CONFIGS, random_model
from tests.ranks import run_ranks
from tests.tiny import make_trainer, quiet_args, tiny_llama, token_rows

LABELS = [True, False, True, True, False, False, True, False, True, False, False, True]


def count_tokens(actor, ran):
    """Note the tokens of each forward without gradient from now on."""

    def note(_, args, inputs):
        if not torch.is_grad_enabled():
            ran.append(inputs["input_ids"].numel())

    actor.body.register_forward_pre_hook(note, with_kwargs=True)


def train(folder, zero_stage, choice, more):
    """Train for three steps; return (metrics lines, final weights), and the tokens that ran without gradient."""
    rows, ran = token_rows(LABELS, 3, answers=2), []
    trainer, strategy = make_trainer(
        rows, zero_stage=zero_stage, batch=6, micro=3, lr=3e-4, steps=3, share_prompts=choice,
        reference=lambda: tiny_llama(1), eval_rows=token_rows(LABELS[:5], 7, answers=2), **more,
    )  # fmt: skip
    for actor in (trainer.model.module, actor_in(trainer.ref_model)):
        if actor is not None:
            count_tokens(actor, ran)
    trainer.fit(quiet_args(folder, 3, eval_steps=3))
    weights = gather_weights(trainer.model.module, torch.float32)
    return ((lines(folder), weights) if strategy.rank == 0 else None), sum(ran)


ADAPTER = {"ref_mode": "adapter", "lora": LoraConfig(lora_rank=4)}
WAYS = {f"model-{stage}-{ranks}": (stage, ranks, {}) for stage, ranks in ((0, 1), (1, 2), (2, 2), (3, 2))}
WAYS |= {f"adapter-{stage}-{ranks}": (stage, ranks, ADAPTER) for stage, ranks in ((0, 1), (1, 2), (2, 2), (3, 2))}
QUICK = {"model-0-1", "model-3-2", "adapter-2-2"}


@pytest.mark.parametrize(
    ("zero_stage", "world_size", "more"),
    [pytest.param(*way, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, way in WAYS.items()],
)
def test_a_run_gives_the_same_with_shared_prompts_and_without(zero_stage, world_size, more, tmp_path):
    off, on = (
        run_ranks(train, world_size, tmp_path, tmp_path / choice, zero_stage, choice, more) for choice in ("off", "on")
    )
    assert_same(off[0][0], on[0][0])
    assert sum(tokens for _, tokens in on) < 0.8 * sum(tokens for _, tokens in off)


@pytest.mark.parametrize("loss_type", [pytest.param("apo_zero_unpaired", marks=pytest.mark.slow), "kto_humanline"])
def test_losses_of_other_kinds_give_the_same(loss_type, tmp_path):
    off, on = (
        run_ranks(train, 2, tmp_path, tmp_path / choice, 2, choice, {"loss_type": loss_type})
        for choice in ("off", "on")
    )
    assert_same(off[0][0], on[0][0])


def fill(folder, choice):
    """Fill a cache; return its values and the tokens that ran."""
    strategy = DeepspeedStrategy(param_dtype="fp32")
    strategy.setup_distributed()
    place = {"rank": strategy.rank, "world_size": strategy.world_size}
    loader, ran = KTODataLoader(token_rows(LABELS, 3, answers=2), 4, 3, seed=5, **place), []
    cache = ReferenceCache(folder, {}, strategy, [loader], 9)
    cache.look_up()
    actor = Actor(tiny_llama(), share_prompts=choice)
    count_tokens(actor, ran)
    with strategy.passing_model(actor) as model:
        plan_for([loader], actor)
        cache.fill(model, lambda: None, StopRequest())
    return cache.values, sum(ran)


def test_a_filled_cache_is_the_same_with_shared_prompts_and_without(tmp_path):
    off, on = (run_ranks(fill, 2, tmp_path, tmp_path / choice, choice) for choice in ("off", "on"))
    (values, _), (others, _) = off[0], on[0]
    assert values.keys() == others.keys()
    assert [others[key] for key in values] == pytest.approx(list(values.values()), rel=1e-6, abs=1e-6)
    assert sum(tokens for _, tokens in on) < 0.75 * sum(tokens for _, tokens in off)


def layout_of(caplog, config, **settings):
    """Return the layout that a model's loader gets, and what is said."""
    loader = KTODataLoader(token_rows([True] * 4), 4, 4)
    with caplog.at_level(logging.DEBUG):
        plan_for([loader], Actor(random_model(config), **settings))
    return loader.layout, caplog.text


def test_what_can_share_prompts_says_so(caplog):
    layout, said = layout_of(caplog, CONFIGS["Llama"])
    assert layout.shares_prompts
    assert "prompts: each runs once for all its completions, without gradient (--share_prompts auto)" in said


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        (CONFIGS["Llama"], {"packing": "off"}, "padded rows"),
        (CONFIGS["Gemma2"], {}, "padded rows"),
        (
            transformers.LlamaConfig(**CONFIGS["Llama"].to_dict() | {"attn_implementation": "flex_attention"}),
            {"attn_implementation": "flex_attention"},
            "--attn_implementation flex_attention, where OpenKTO's own attention is needed",
        ),
    ],
)
def test_what_cannot_share_prompts_says_why_and_on_is_an_error(caplog, config, settings, reason):
    layout, said = layout_of(caplog, config, **settings)
    assert not layout.shares_prompts
    assert f"prompts: each runs again with each completion (--share_prompts auto): {reason}" in said
    with pytest.raises(ConfigError, match=f"--share_prompts: on needs packed rows .* got {reason}. Take auto."):
        layout_of(caplog, config, share_prompts="on", **settings)


def test_off_is_the_ordinary_layout(caplog):
    layout, said = layout_of(caplog, CONFIGS["Llama"], share_prompts="off")
    assert not layout.shares_prompts
    assert "prompt" not in said


@pytest.mark.parametrize(
    ("choice", "precision", "of_training"), [("auto", "fp32", True), ("auto", "bf16", False), ("on", "bf16", True)]
)
def test_in_half_precision_auto_leaves_the_reference_of_a_step_the_policys_micro_batches(
    choice, precision, of_training
):
    rows, actor = token_rows([True] * 4), Actor(tiny_llama(), share_prompts=choice)
    loaders = [KTODataLoader(rows, 4, 4), KTODataLoader(rows, None, 4)]
    plan_for(loaders, actor, reference_runs=True, precision=precision)
    assert [loader.layout.shares_pairs for loader in loaders] == [of_training, True]
    assert all(loader.layout.shares_matched for loader in loaders)  # both models run those
    assert all(loader.layout.shares_prompts for loader in loaders)
    plan_for(loaders, actor, precision=precision)
    assert [loader.layout.shares_pairs for loader in loaders] == [False, True]
    # What a cache holds was computed in other micro-batches.
    assert all(loader.layout.shares_matched == of_training for loader in loaders)


@pytest.mark.parametrize(
    ("settings", "more"),
    [({"lora": LoraConfig(lora_rank=2, lora_dropout=0.1)}, {}), ({}, {"with_balancing_loss": True})],
    ids=["dropout", "balancing loss"],
)
def test_each_row_trains_on_its_own_prompt_where_a_shared_one_would_count_otherwise(settings, more):
    loader = KTODataLoader(token_rows([True] * 4), 4, 4)
    plan_for([loader], Actor(tiny_llama(), **settings), reference_runs=True, **more)
    assert loader.layout.shares_prompts
    assert not loader.layout.shares_matched
