"""A reference that follows the policy: what it becomes, at every ZeRO stage, and through a checkpoint."""

import pytest
import torch

from openkto.config import LoraConfig
from openkto.distributed import manifest as manifests
from openkto.distributed.moving_reference import reference_weights
from openkto.errors import ConfigError
from tests.helpers.records import records, worst
from tests.ranks import run_ranks
from tests.tiny import make_trainer, quiet_args, tiny_llama, token_rows

STEPS = 5


def run(folder, zero_stage, stop, alpha=0.25, steps=2, **more):
    """Return the reference's weights and the policy's, whole on rank 0."""
    rows = token_rows([True, False] * 10)
    trainer, _ = make_trainer(
        rows, zero_stage=zero_stage, lr=0.01, ref_sync_steps=steps, ref_sync_alpha=alpha, steps=STEPS, **more
    )
    trainer.fit(quiet_args(folder, STEPS, stop_after_steps=stop, load_checkpoint=True))
    return reference_weights(trainer.ref_model), reference_weights(trainer.model)


def run_with(folder, zero_stage, stop, more):
    return run(folder, zero_stage, stop, **more)


def start() -> dict:
    return {f"model.{name}": parameter.detach() for name, parameter in tiny_llama().named_parameters()}


def test_the_reference_is_a_quarter_of_the_policy_on_the_way(tmp_path):
    # Two steps, one move: 3/4 of the start and 1/4 of the policy after step 2.
    reference, policy = run_ranks(run_with, 1, tmp_path, tmp_path / "a", 0, 2, {})[0]
    expected = {name: 0.75 * weight + 0.25 * policy[name] for name, weight in start().items()}
    assert worst(reference, expected) < 1e-7
    assert worst(reference, start()) > 1e-3


@pytest.mark.parametrize("zero_stage", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_every_stage_moves_it_alike(tmp_path, zero_stage):
    expected, _ = run_ranks(run_with, 1, tmp_path, tmp_path / "one", 0, None, {})[0]
    reference, _ = run_ranks(run_with, 2, tmp_path, tmp_path / "two", zero_stage, None, {})[0]
    assert worst(reference, expected) < 1e-5
    for line, other in zip(records(tmp_path / "two"), records(tmp_path / "one"), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_a_move_of_all_the_way_makes_rewards_zero_in_the_next_step(tmp_path):
    run_ranks(run_with, 2, tmp_path, tmp_path / "a", 3, None, {"alpha": 1.0})
    rewards = {x["step"]: (x["rewards/chosen"], x["rewards/rejected"]) for x in records(tmp_path / "a")[:STEPS]}
    assert rewards[1] == rewards[3] == rewards[5] == (0.0, 0.0)
    assert 0.0 not in rewards[2]
    assert 0.0 not in rewards[4]


@pytest.mark.parametrize(
    ("zero_stage", "ranks", "resumed"),
    [(2, 2, (2, 2)), pytest.param(3, 2, (3, 2), marks=pytest.mark.slow), (3, 2, (1, 1))],
)
def test_a_checkpoint_keeps_where_the_reference_is(tmp_path, zero_stage, ranks, resumed):
    whole, _ = run_ranks(run_with, ranks, tmp_path, tmp_path / "whole", zero_stage, None, {})[0]
    run_ranks(run_with, ranks, tmp_path, tmp_path / "cut", zero_stage, 3, {})
    cut, _ = run_ranks(run_with, resumed[1], tmp_path, tmp_path / "cut", resumed[0], None, {})[0]
    assert worst(whole, cut) <= (0.0 if resumed == (zero_stage, ranks) else 1e-5)
    root = tmp_path / "cut/checkpoints"
    manifest = manifests.read_manifest(root / "global_step3")
    assert manifests.problem_with(root / "global_step3", manifest.files) is None
    assert "reference.safetensors" in manifest.files


def test_a_half_precision_reference_moves_too(tmp_path):
    reference, policy = run_ranks(run_with, 2, tmp_path, tmp_path / "a", 2, 2, {"alpha": 1.0, "param_dtype": "bf16"})[0]
    assert all(torch.equal(weight, policy[name]) for name, weight in reference.items())


def refused():
    said = []
    for more in (
        {"reference": lambda: tiny_llama(hidden_size=16)},
        {"lora": LoraConfig(lora_rank=2), "ref_mode": "adapter"},
        {"lora": LoraConfig(lora_rank=2)},
    ):
        try:
            make_trainer(token_rows([True, False] * 4), ref_sync_steps=1, **more)
        except ConfigError as error:
            said.append(str(error))
    return said


def test_a_reference_that_cannot_follow_is_refused(tmp_path):
    rule = "--ref_sync_steps: the reference must be a model of its own with the policy's parameters; got "
    cure = ". Take another reference, or leave it out."
    said = run_ranks(refused, 1, tmp_path)[0]
    assert said == [f"{rule}one with others{cure}", f"{rule}none{cure}", f"{rule}one with others{cure}"]
