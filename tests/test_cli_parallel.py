"""The commands where ranks share weights, tokens or gathered parameters: what they leave is what one rank leaves."""

import json

import pytest
import torch

from openkto.commands import convert_checkpoint, evaluate, train
from openkto.commands.run import run
from tests.helpers.commands import flags, run_to_status, status
from tests.helpers.records import assert_close, assert_same_metrics, lines, weights
from tests.ranks import run_ranks

TENSOR, SEQUENCE = ["--tensor_parallel_size", "2"], ["--sequence_parallel_size", "2"]


@pytest.fixture
def alone(place):
    """What one rank leaves."""
    run_ranks(train.main, 1, place, flags(place, "--eval_at_start", "--save_path", f"{place}/alone"))
    return place / "alone"


@pytest.mark.parametrize(
    ("world_size", "more"),
    [
        (2, [*TENSOR, "--zero_stage", "3"]),
        pytest.param(2, SEQUENCE, marks=pytest.mark.slow),
        pytest.param(4, [*SEQUENCE, "--zero_stage", "3"], marks=pytest.mark.slow),
        pytest.param(2, ["--zpg", "2", "--zero_stage", "3", "--ref_mode", "model"], marks=pytest.mark.slow),
    ],
)
def test_a_run_evaluates_saves_and_exports_what_one_rank_does(place, alone, world_size, more):
    run_ranks(train.main, world_size, place, flags(place, "--eval_at_start", *more))
    assert_same_metrics(alone, place / "out")
    assert_close(weights(alone), weights(place / "out"))
    expected, got = ([line["num_tokens"] for line in lines(run, "train")] for run in (alone, place / "out"))
    assert got == expected
    # And evaluated by ranks that share, too.
    argv = ["--pretrain", f"{place}/out", "--max_len", "128", "--eval_dataset", f"{place}/eval.jsonl"]
    argv += ["--ref_pretrain", f"{place}/model", "--output", f"{place}/e.json", *more]
    run_ranks(evaluate.main, world_size, place, argv)
    values = json.loads((place / "e.json").read_text())["eval"]
    logged = lines(place / "out", "eval")[-1]
    assert values.pop("rows") == 7
    assert values == pytest.approx({name: logged[name] for name in values}, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("more", [pytest.param([*TENSOR, "--zero_stage", "3"], marks=pytest.mark.slow), SEQUENCE])
def test_a_stopped_run_resumes_and_its_checkpoint_becomes_a_model(place, alone, more):
    argv = flags(place, "--eval_at_start", "--load_checkpoint", *more)
    run_ranks(train.main, 2, place, [*argv, "--stop_after_steps", "1"])
    run_ranks(train.main, 2, place, argv)
    assert_close(weights(alone), weights(place / "out"))
    folder = ["--load_checkpoint", f"{place}/out/checkpoints/global_step3"]
    assert run(convert_checkpoint.main, ["--pretrain", f"{place}/model", "--save_path", f"{place}/made", *folder]) == 0
    made, saved = weights(place / "made"), weights(place / "out")
    assert all(torch.equal(made[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize("way", [TENSOR, pytest.param(SEQUENCE, marks=pytest.mark.slow)], ids=["weights", "tokens"])
@pytest.mark.parametrize(
    "more",
    # Some of an adapter's gradients are so near 0 that Adam makes of their round-off steps of its own: 2e-5 of a weight
    # at a learning rate of 1e-3, also between one rank and two that share nothing.
    [
        [],
        pytest.param(
            ["--lora_rank", "4", "--ref_mode", "adapter", "--zero_stage", "3", "--learning_rate", "3e-4"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["cached", "adapter"],
)
def test_a_cache_or_an_adapter_serves_as_the_reference(place, way, more):
    given = more or ["--ref_mode", "cached"]
    # In larger micro-batches, by a limit of tokens that each of two GPUs half fills.
    given = [*given, "--max_tokens_per_micro_batch", "128"]
    run_ranks(train.main, 1, place, flags(place, "--save_path", f"{place}/alone", *(more or ["--ref_mode", "model"])))
    run_ranks(train.main, 2, place, flags(place, *way, *given))
    assert_same_metrics(place / "alone", place / "out")
    name = "adapter_model.safetensors" if more else "model.safetensors"
    assert_close(weights(place / "alone", name), weights(place / "out", name))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ([*SEQUENCE, *TENSOR], "--sequence_parallel_size: cannot be combined with --tensor_parallel_size"),
        ([*TENSOR, "--lora_rank", "4", "--use_dora"], "--use_dora: cannot be combined with --tensor_parallel_size"),
        ([*TENSOR, "--zero_stage", "3", "--zpg", "2"], "--zpg: has not been tested with --tensor_parallel_size"),
        ([*SEQUENCE, "--torch_compile"], "--torch_compile: has not been tested with --sequence_p"),
        (
            [*TENSOR, "--gradient_checkpointing", "selective"],
            "--gradient_checkpointing: must not be selective with --tensor_paral",
        ),
        (["--tensor_parallel_size", "4"], "must divide the model's 2 key-value heads; got 4. Take a number that does."),
        (["--sequence_parallel_size", "3"], "must divide the model's 4 attention heads; got 3. Take a number that"),
        ([*SEQUENCE, "--packing", "off"], "--packing: must be on for --sequence_parallel_size, which cuts packed"),
        ([*SEQUENCE, "--attn_implementation", "sdpa"], "--attn_implementation: is OpenKTO's own with --sequence_paral"),
        ([*SEQUENCE, "--max_tokens_per_micro_batch", "63"], "the longest row, --max_len 128 shared by 2 GPUs; got 63"),
        ([*TENSOR, "--ds_config", "{place}/ds.json"], "tensor_parallel: is decided by --tensor_parallel_size"),
        (["--ds_config", "{place}/sp.json"], "sequence_parallel_size: is decided by --sequence_parallel_size (1)"),
    ],
)
def test_what_cannot_be_shared_is_one_sentence(place, more, sentence, capsys):
    (place / "ds.json").write_text('{"tensor_parallel": {"autotp_size": 4}}')
    (place / "sp.json").write_text('{"sequence_parallel_size": 2}')
    code, text = status(train.main, flags(place, *(word.format(place=place) for word in more)), capsys)
    assert code == 2
    (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert sentence in error


@pytest.mark.parametrize("way", [TENSOR, pytest.param(SEQUENCE, marks=pytest.mark.slow)], ids=["weights", "tokens"])
def test_the_ranks_must_be_divisible(place, way):
    for code, text in run_ranks(run_to_status, 3, place, flags(place, *way)):
        assert code == 2
        assert (
            text.splitlines()[-1]
            == f"error: {way[0]}: must divide the number of ranks, 3; got 2. Change one of the two."
        )
