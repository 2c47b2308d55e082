"""Two ranks that disagree: one sentence on both, before anything that the difference would break or make wrong."""

import json
import os
import shutil

import pytest
import safetensors.torch

from openkto.commands import evaluate, precompute_reference, train
from openkto.distributed.agreement import check_all_agree, on_some_ranks
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.errors import ConfigError
from tests.helpers.commands import run_to_status
from tests.ranks import run_ranks
from tests.text_rows import write_model
from tests.tiny import make_trainer, quiet_args, token_rows


def flags(place, **changes):
    settings = {
        "pretrain": place / "model", "dataset": place / "rows.jsonl", "train_batch_size": 8, "max_len": 128,
        "save_path": place / "out", "use_tensorboard": "none", **changes,
    }  # fmt: skip
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def each_its_own(command, *argv):
    return run_to_status(argv[int(os.environ["RANK"])], command)


def refusals(place, command, *argv):
    """Return the sentence of each rank, which has the status of a wrong configuration."""
    found = run_ranks(each_its_own, 2, place, command, *argv, timeout=60)
    assert [code for code, _ in found] == [2, 2], found
    return [text.splitlines()[-1] for _, text in found]


def assert_all_say(sentences, difference):
    for sentence in sentences:
        assert sentence.startswith("error: all ranks: must train the same run; got ")
        assert difference in sentence


@pytest.mark.parametrize(
    ("flag", "first", "second"),
    [
        ("beta", 0.1, 0.2),
        pytest.param("seed", 1, 2, marks=pytest.mark.slow),
        ("max_steps", 3, 4),
        pytest.param("train_batch_size", 8, 10, marks=pytest.mark.slow),
        pytest.param("micro_train_batch_size", 2, 4, marks=pytest.mark.slow),
        pytest.param("zero_stage", 2, 3, marks=pytest.mark.slow),
        ("tensor_parallel_size", 1, 2),
    ],
)
def test_another_setting_on_one_rank_is_named_on_both(place, flag, first, second):
    argv = [flags(place, **{flag: value}) for value in (first, second)]
    assert_all_say(refusals(place, train.main, *argv), f"--{flag}: rank 0 {first}, rank 1 {second}")


def test_where_a_node_finds_its_files_may_differ(place):
    shutil.copytree(place / "model", place / "copy")
    shutil.copy(place / "rows.jsonl", place / "other.jsonl")
    other = {"pretrain": place / "copy", "dataset": place / "other.jsonl", "data_cache_dir": place / "c"}
    argv = [flags(place, max_steps=1), flags(place, max_steps=1, **other)]
    assert [code for code, _ in run_ranks(each_its_own, 2, place, train.main, *argv)] == [0, 0]


def other_rows(place, change):
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    (place / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in change(rows)))
    return place / "other.jsonl"


def with_a_label_flipped(rows):
    return [row | {"label": row["label"] != (i == 7)} for i, row in enumerate(rows)]


@pytest.mark.parametrize("change", [with_a_label_flipped, lambda rows: rows[:-1]], ids=["label", "count"])
def test_other_rows_on_one_rank_are_named_on_both(place, change):
    argv = [flags(place), flags(place, dataset=other_rows(place, change))]
    assert_all_say(refusals(place, train.main, *argv), "the training rows (fingerprint): rank 0 ")


def other_weights(place):
    shutil.copytree(place / "model", place / "other")
    file = place / "other/model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["model.norm.weight"][3] += 0.5
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    return place / "other"


def test_other_weights_on_one_rank_are_named_on_both(place):
    argv = [flags(place), flags(place, pretrain=other_weights(place))]
    sentences = refusals(place, train.main, *argv)
    assert_all_say(sentences, "the files of the policy: rank 0 ")
    assert_all_say(sentences, "the files of the reference: rank 0 ")


def test_evaluating_and_precomputing_compare_the_ranks_too(place):
    assert_all_say(
        refusals(place, precompute_reference.main, flags(place), flags(place, seed=2)), "--seed: rank 0 42, rank 1 2"
    )
    write_model(place / "start", seed=1)
    common = ["--eval_dataset", f"{place}/rows.jsonl", "--max_len", "128", "--output", f"{place}/e.json"]
    common += ["--ref_pretrain", f"{place}/start"]
    models = [f"{place}/model", str(other_weights(place))]
    argv = [[*common, "--pretrain", model] for model in models]
    assert_all_say(refusals(place, evaluate.main, *argv), "the files of the policy: rank 0 ")
    argv = [[*common, "--pretrain", models[0]], [*common, "--pretrain", models[0]]]
    argv[1][1] = f"rows={other_rows(place, with_a_label_flipped)}"
    assert_all_say(refusals(place, evaluate.main, *argv), "the evaluation rows rows (fingerprint): rank 0 ")


class ThreeRanks:
    """What rank 1 of three sees, whose ranks gather these values."""

    rank, world_size = 1, 3

    def __init__(self, *gathered):
        self.gathered = gathered

    def gather_objects(self, value):
        return list(self.gathered)


def test_the_sentence_names_the_first_rank_that_differs_and_how_many_do():
    check_all_agree(ThreeRanks({"a": 1}, {"a": 1}, {"a": 1}), {"a": 1})
    names = {name: 1 for name in "abcdef"}
    with pytest.raises(ConfigError) as caught:
        check_all_agree(ThreeRanks(names, names | {"b": 2}, {name: 0 for name in "abcdef"}), names)
    assert str(caught.value) == (
        "all ranks: must train the same run; got b: rank 0 1, rank 1 2 (2 of 3 ranks differ from rank 0). "
        "Start every rank with the same command, files and versions."
    )
    with pytest.raises(ConfigError, match="c: rank 0 1, rank 2 0; d: rank 0 1, rank 2 0; and 2 more"):
        check_all_agree(ThreeRanks(names, names, {name: 0 for name in "abcdef"}), names)
    with pytest.raises(ConfigError, match="z: rank 0 not set, rank 1 7"):
        check_all_agree(ThreeRanks({}, {"z": 7}, {}), {})


def fail_on_rank_one():
    strategy = DeepspeedStrategy(param_dtype="fp32")
    strategy.setup_distributed()

    def fail():
        raise PermissionError(13, "Permission denied", "/model")

    try:
        on_some_ranks(strategy, fail, is_mine=strategy.rank == 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_what_fails_on_one_rank_in_a_way_of_its_own_ends_the_others_too(tmp_path):
    assert run_ranks(fail_on_rank_one, 2, tmp_path, timeout=30) == [
        "OpenKTOError: rank 1 failed with PermissionError: [Errno 13] Permission denied: '/model'",
        "PermissionError: [Errno 13] Permission denied: '/model'",
    ]


def fit_with_own_beta(folder):
    rank = int(os.environ["RANK"])
    trainer, _ = make_trainer(token_rows([True, False] * 4), beta=0.1 * (1 + rank))
    with pytest.raises(ConfigError) as caught:
        trainer.fit(quiet_args(folder, 1))
    return str(caught.value)


def test_the_library_compares_its_ranks_before_the_first_step(tmp_path):
    for said in run_ranks(fit_with_own_beta, 2, tmp_path, tmp_path / "out", timeout=100):
        assert said.startswith("all ranks: must train the same run; got --beta: rank 0 0.1, rank 1 0.2.")
