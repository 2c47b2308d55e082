"""The commands where ranks share weights or tokens: what they leave is what one rank leaves."""

import json

import pytest
import safetensors.torch
import torch

from openkto.commands import convert_checkpoint, evaluate, train
from openkto.commands.run import run
from tests.ranks import run_ranks
from tests.test_cli import flags, launch, lines, place, run_to_status, status  # noqa: F401 (place is a fixture)
from tests.test_cli_cached import NAMES, assert_same_metrics

TENSOR = ["--tensor_parallel_size", "2"]


def weights(folder, name="model.safetensors"):
    return safetensors.torch.load_file(folder / name)


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def flat_numbers(folder, kind):
    return [
        {name: line[name] for name in (*NAMES, "num_tokens", "padding_fraction") if name in line}
        for line in lines(folder, kind)
    ]


@pytest.fixture
def alone(place):  # noqa: F811
    """What one rank leaves."""
    run_ranks(train.main, 1, place, flags(place, "--eval_at_start", "--save_path", f"{place}/alone"))
    return place / "alone"


@pytest.mark.parametrize(("world_size", "more"), [(2, TENSOR), (4, [*TENSOR, "--zero_stage", "3"])])
def test_a_run_evaluates_saves_and_exports_what_one_rank_does(place, alone, world_size, more):  # noqa: F811
    run_ranks(train.main, world_size, place, flags(place, "--eval_at_start", *more))
    assert_same_metrics(alone, place / "out")
    assert_same_weights(weights(alone), weights(place / "out"))
    assert [line["num_tokens"] for line in lines(place / "out", "train")] == [
        line["num_tokens"] for line in lines(alone, "train")
    ]
    # And evaluated with its ranks sharing weights, too.
    argv = ["--pretrain", f"{place}/out", "--max_len", "128", "--eval_dataset", f"{place}/eval.jsonl"]
    argv += ["--ref_pretrain", f"{place}/model", "--output", f"{place}/e.json", *more]
    run_ranks(evaluate.main, world_size, place, argv)
    values = json.loads((place / "e.json").read_text())["eval"]
    logged = lines(place / "out", "eval")[-1]
    assert values.pop("rows") == 7
    assert values == pytest.approx({name: logged[name] for name in values}, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("zero_stage", ["0", "2", "3"])
def test_a_stopped_run_goes_on_and_its_checkpoint_becomes_a_model(place, alone, zero_stage):  # noqa: F811
    argv = flags(place, "--eval_at_start", "--load_checkpoint", "--zero_stage", zero_stage, *TENSOR)
    run_ranks(train.main, 2, place, [*argv, "--stop_after_steps", "1"])
    run_ranks(train.main, 2, place, argv)
    assert_same_weights(weights(alone), weights(place / "out"))
    folder = ["--load_checkpoint", f"{place}/out/checkpoints/global_step3"]
    assert run(convert_checkpoint.main, ["--pretrain", f"{place}/model", "--save_path", f"{place}/made", *folder]) == 0
    made, saved = weights(place / "made"), weights(place / "out")
    assert all(torch.equal(made[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize("more", [[], ["--lora_rank", "4", "--ref_mode", "adapter"]])
def test_a_cache_or_an_adapter_serves_as_the_reference(place, more):  # noqa: F811
    given = more or ["--ref_mode", "cached"]
    run_ranks(train.main, 1, place, flags(place, "--save_path", f"{place}/alone", *(more or ["--ref_mode", "model"])))
    run_ranks(train.main, 2, place, flags(place, *TENSOR, *given))
    assert_same_metrics(place / "alone", place / "out")
    name = "adapter_model.safetensors" if more else "model.safetensors"
    assert_same_weights(weights(place / "alone", name), weights(place / "out", name))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--sequence_parallel_size", "2", *TENSOR], "--sequence_parallel_size: goes without --tensor_parallel_size"),
        ([*TENSOR, "--lora_rank", "4", "--use_dora"], "--use_dora: goes without --tensor_parallel_size"),
        (["--tensor_parallel_size", "4"], "must divide the model's 2 key-value heads; got 4. Take a number that does."),
        ([*TENSOR, "--ds_config", "{place}/ds.json"], "tensor_parallel: is decided by --tensor_parallel_size"),
    ],
)
def test_what_cannot_be_shared_is_one_sentence(place, more, sentence, capsys):  # noqa: F811
    (place / "ds.json").write_text('{"tensor_parallel": {"autotp_size": 4}}')
    code, text = status(train.main, flags(place, *(word.format(place=place) for word in more)), capsys)
    assert code == 2
    (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert sentence in error


def test_the_ranks_must_be_divisible(place):  # noqa: F811
    for code, text in run_ranks(run_to_status, 3, place, flags(place, *TENSOR)):
        assert code == 2
        assert text.splitlines()[-1] == (
            "error: --tensor_parallel_size: must divide the number of ranks, 3; got 2. Change one of the two."
        )
