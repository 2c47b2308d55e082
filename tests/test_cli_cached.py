"""The train command with a cached reference: the numbers of a model beside the policy, and none in memory."""

import json
import os
import re
import shutil
import signal
from collections import namedtuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from openkto.commands import train
from openkto.files import scratch_name
from openkto.models import Actor
from openkto.trainer import reference_cache
from tests.helpers import commands
from tests.helpers.commands import run_to_status
from tests.helpers.records import assert_close, assert_same_lines, assert_same_metrics, batches, lines, weights
from tests.ranks import run_ranks


def flags(place, *more):
    """Return the flags of a run of two steps an epoch.

    Later ones may take the folder of earlier ones, as the cache is what is looked at here.
    """
    return commands.flags(place, "--overwrite", "--train_batch_size", "10", *more)


def parts(place):
    return sorted((place / "cache/ref").glob("*/part-*.parquet"))


def told(argv, world_size, place):
    """Run a training command that must succeed; return what its first rank said."""
    (code, said), *_ = run_ranks(run_to_status, world_size, place, argv)
    assert code == 0, said
    return said


def counted(argv):
    """Train; return the forwards of frozen models before the first step, and after it."""
    counts, is_training, forward = [0, 0], [False], Actor.forward

    def counting(self, *args, **more):
        if any(parameter.requires_grad for parameter in self.parameters()):
            is_training[0] = True
        else:
            counts[is_training[0]] += 1
        return forward(self, *args, **more)

    Actor.forward = counting
    train.main(argv)
    return counts


@pytest.mark.parametrize("zero_stage", [*(pytest.param(n, marks=pytest.mark.slow) for n in "012"), "3"])
def test_two_epochs_on_two_ranks_resumed_on_one_have_the_numbers_of_a_model(place, zero_stage):
    common = ["--max_epochs", "2", "--zero_stage", zero_stage, "--eval_at_start", "--micro_train_batch_size", "3"]
    run_ranks(train.main, 1, place, flags(place, *common, "--ref_mode", "model", "--save_path", f"{place}/model_run"))
    cached = flags(place, *common, "--ref_mode", "cached", "--load_checkpoint")
    run_ranks(train.main, 2, place, [*cached, "--stop_after_steps", "3"])
    before = parts(place)
    (counts,) = run_ranks(counted, 1, place, cached)
    assert parts(place) == before
    assert counts[0] > 0  # the sample that is checked
    assert counts[1] == 0
    assert_same_metrics(place / "model_run", place / "out")
    assert_close(weights(place / "model_run"), weights(place / "out"))


# The evaluation rows are messages and the training rows texts: wrapped in the template, these would be the same tokens.
PLAIN = ("--apply_chat_template", "false")


def rows_in(files):
    return sum(pq.read_table(file).num_rows for file in files)


def test_later_runs_compute_only_what_is_missing(place):
    first = flags(place, *PLAIN, "--ref_mode", "cached", "--log_batches")
    run_ranks(train.main, 2, place, first)
    one_epoch = parts(place)
    tokens = {r["row"]: r for r in map(json.loads, (place / "out/tokens.jsonl").read_text().splitlines())}
    pairs = {(x, y) for batch in batches(place / "out") for x, y in zip(batch["rows"], batch["kl_rows"], strict=True)}
    texts = {(*tokens[x]["prompt_ids"], *tokens[y]["completion_ids"]) for x, y in pairs | {(x, x) for x, _ in pairs}}
    # And seven rows to evaluate on with seven mismatched pairs, one of which has the text of a row.
    assert rows_in(one_epoch) == len(texts) + 13

    other = ["--beta", "0.5", "--learning_rate", "1e-4", "--micro_train_batch_size", "2", "--zero_stage", "3"]
    other += ["--share_prompts", "off"]  # so that forwards can be counted
    (counts,) = run_ranks(counted, 1, place, flags(place, *PLAIN, "--ref_mode", "cached", *other))
    # 32 of the training set's pairs at the most and all 14 of the other's, two at a time, and the four short
    # forwards that every model starts with; nothing while training.
    assert counts == [32 // 2 + 14 // 2 + 4, 0]
    assert parts(place) == one_epoch

    for more in (["--max_epochs", "2"], ["--seed", "7"]):
        before = rows_in(parts(place))
        said = told(flags(place, *PLAIN, "--ref_mode", "cached", *more), 1, place)
        assert 0 < rows_in(parts(place)) - before <= 20, "mismatched pairs of one more epoch alone"
        assert "cached values checked: at most" in said
    # Shorter: what is not cut is there already, what is cut is computed.
    before = rows_in(parts(place))
    run_ranks(train.main, 1, place, flags(place, *PLAIN, "--ref_mode", "cached", "--max_len", "40"))
    assert 0 < rows_in(parts(place)) - before < len(texts) + 13


def killed_filling(argv, forwards):
    """Be killed by the operating system in the middle of filling, with a part on the disk for each micro-batch."""
    reference_cache.SECONDS_A_PART, reference_cache.MICRO_BATCHES_A_TURN = 0.0, 1
    forward, done = reference_cache._forward, [0]

    def mortal(*args):
        done[0] += 1
        if done[0] > forwards:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*args)

    reference_cache._forward = mortal
    train.main(argv)


def test_a_killed_filling_resumes_and_a_damaged_part_is_computed_again(place):
    argv = flags(place, *PLAIN, "--ref_mode", "cached", "--micro_train_batch_size", "4", "--share_prompts", "off")
    whole = told([*argv, "--ref_cache_dir", f"{place}/other"], 1, place)
    expected = lines(place / "out", "train")
    total = rows_in((place / "other").glob("*/part-*.parquet"))
    # Some of the run's pairs have the same tokens: they are computed once.
    computed, needed = map(int, re.search(r"reference: computing (\d+) of (\d+) pairs", whole).groups())
    assert total == computed < needed
    with pytest.raises(AssertionError, match="a rank failed"):
        run_ranks(killed_filling, 2, place, argv, 3)
    kept = parts(place)
    # The pairs of the training rows go in waves of two micro-batches with four pairs each.
    assert [rows_in([part]) for part in kept] == [8, 8, 8]
    debris = kept[0].with_name(scratch_name(".part-").replace(f".{os.getpid()}-", ".999999999-"))
    debris.write_bytes(b"half")

    content = bytearray(kept[1].read_bytes())
    content[len(content) // 2] ^= 1
    kept[1].write_bytes(content)
    kept[2].write_bytes(kept[2].read_bytes()[:-1])
    said = told(argv, 2, place)
    assert said.count("is damaged and was removed; what it held is computed again.") == 2
    assert f"reference: computing {total - 8} of {needed} pairs" in said
    assert rows_in(parts(place)) == total
    assert not debris.exists()
    for line, other in zip(lines(place / "out", "train"), expected, strict=True):
        assert other["loss"] == pytest.approx(line["loss"], rel=1e-6)


def rewrite(file, change):
    """Put other values into a part, under the name that its new content has."""
    table = pq.read_table(file)
    values = dict(zip(table["key"].to_pylist(), change(table["log_prob"].to_numpy()).tolist(), strict=True))
    reference_cache.write_part(file.parent, {}, values)
    file.unlink()


def test_values_of_other_weights_are_never_used(place):
    argv = flags(place, "--ref_mode", "cached")
    run_ranks(train.main, 1, place, argv)
    (first,) = parts(place)
    # One flipped bit of one weight: another model, with a folder of its own.
    path = place / "model/model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights["model.layers.0.self_attn.q_proj.weight"].view(torch.int32)[0, 0] ^= 1
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    run_ranks(train.main, 1, place, argv)
    (second,) = set(parts(place)) - {first}
    assert rows_in([second]) == rows_in([first])
    # The same folder with numbers that are not this model's, whole as far as a checksum can tell.
    rewrite(second, lambda log_prob: log_prob + np.where(np.arange(len(log_prob)) % 7 == 0, 1e-2, 0.0))
    ((code, said),) = run_ranks(run_to_status, 1, place, argv)
    assert code == 2
    assert f"error: --ref_cache_dir {second.parent}: its log-probabilities must be the reference model's; got " in said
    assert "checked are off. Delete that folder to compute them again." in said
    said = told([*argv, "--ref_mode", "auto"], 1, place)
    assert "warning: the reference's cache is not used: --ref_cache_dir" in said
    assert said.count(f"the reference is {place}/model\n") == 1
    shutil.rmtree(second.parent)
    assert f"the reference is {place}/model, from the cache" in told(argv, 1, place)


def test_auto_fills_the_cache_where_that_runs_no_more_tokens(place):
    argv = flags(place, *PLAIN, "--max_epochs", "2")
    said = told(argv, 2, place)
    assert " pairs once, no more tokens than in the loop (--ref_mode auto)" in said
    assert f"the reference is {place}/model, from the cache" in said
    (counts,) = run_ranks(counted, 1, place, argv)
    assert counts[1] == 0
    about = json.loads((parts(place)[0].parent / "about.json").read_text())
    assert (about["param_dtype"], about["device"]) == ("fp32", "cpu")
    # With an adapter the policy is its own reference, unless a cache is asked for.
    lora = [*argv, "--lora_rank", "4"]
    assert "the reference is the policy at the start of training\n" in told(lora, 1, place)
    own, before = lines(place / "out", "train"), parts(place)
    said = told([*lora, "--ref_mode", "cached", "--save_path", f"{place}/cached"], 2, place)
    assert f"the reference is {place}/model, from the cache" in said
    assert parts(place) == before
    assert_same_lines(own, lines(place / "cached"))


def test_auto_keeps_a_model_where_a_cache_would_cost_more_or_cannot_be_written(place):
    # A run that may end after two steps, and would have cached the pairs of four epochs.
    early = ["--eval_steps", "1", "--keep_best", "loss", "--early_stop_patience", "1", "--max_epochs", "4"]
    said = told(flags(place, *PLAIN, *early), 1, place)
    assert "reference: in the loop, for " in said
    assert f"the reference is {place}/model\n" in said
    said = told(flags(place, "--ref_cache_dir", "/proc/nothing"), 1, place)
    assert "warning: the reference's cache is not used: --ref_cache_dir: must be a folder that can be read and" in said
    assert f"the reference is {place}/model\n" in said
    assert parts(place) == []


def test_auto_keeps_what_a_run_has_when_it_is_resumed(place):
    argv = flags(place, *PLAIN, "--max_epochs", "2")
    # A start of one step makes fewer forwards than the cache of the whole run would take.
    said = told([*argv, "--stop_after_steps", "1"], 1, place)
    assert "reference: in the loop, for " in said
    assert parts(place) == []
    said = told([*argv, "--load_checkpoint"], 1, place)
    assert f"the reference is {place}/model\n" in said
    assert parts(place) == []
    told(argv, 1, place)
    assert "reference: from the cache, which holds all " in told([*argv, "--stop_after_steps", "1"], 1, place)
    shutil.rmtree(place / "cache/ref")
    assert f"the reference is {place}/model, from the cache" in told([*argv, "--load_checkpoint"], 1, place)


def test_in_bfloat16_the_noise_is_measured_and_said(place):
    argv = flags(place, "--ref_mode", "cached", "--param_dtype", "bf16", "--zero_stage", "1")
    run_ranks(train.main, 1, place, argv)
    said = told([*argv, "--micro_train_batch_size", "3"], 2, place)
    assert "cached values checked: at most " in said
    assert " a token, from the model's in bf16" in said


def with_a_cache_of_its_own(argv):
    os.environ["OPENKTO_CACHE"] += os.environ["RANK"]
    return run_to_status(argv)


def test_a_folder_that_cannot_serve_is_one_sentence(place):
    argv = flags(place, "--ref_mode", "cached")
    ((code, said),) = run_ranks(run_to_status, 1, place, [*argv, "--ref_cache_dir", "/proc/nothing"])
    assert code == 2
    assert "error: --ref_cache_dir: must be a folder that can be read and written; got /proc/nothing/" in said
    # Two nodes with folders of their own, one of them filled before.
    run_ranks(with_a_cache_of_its_own, 1, place, argv)
    (code, said), _ = run_ranks(with_a_cache_of_its_own, 2, place, argv)
    assert code == 2
    assert "error: --ref_cache_dir: must be a folder that all nodes share; got " in said
    assert ", where rank 1 finds other files than rank 0. Name one that is" in said


def on_a_full_disk(argv):
    usage = namedtuple("usage", "total used free")
    shutil.disk_usage = lambda _: usage(0, 0, 2**20)
    return run_to_status(argv)


def test_a_disk_without_room_for_the_model_is_said_before_the_cache_is_filled(place):
    ((code, said),) = run_ranks(on_a_full_disk, 1, place, flags(place, "--ref_mode", "cached"))
    assert code == 2
    assert f"error: --save_path {place}/out: the model and its records need 32 MiB; got 1 MiB free." in said
    assert "reference: computing" not in said


def test_a_reference_that_is_not_finite_is_one_sentence(place):
    path = place / "model/model.safetensors"
    weights = safetensors.torch.load_file(path)
    # Of all tokens but those of the short forward that every model starts with.
    short = torch.arange(24) * 7919 % len(weights["model.embed_tokens.weight"])
    broken = torch.ones(len(weights["model.embed_tokens.weight"]), dtype=torch.bool)
    broken[short] = False
    weights["model.embed_tokens.weight"][broken] = float("nan")
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    ((code, said),) = run_ranks(run_to_status, 1, place, flags(place, "--ref_mode", "cached"))
    assert code == 1
    assert "more: every log-probability must be finite in fp32; got nan or infinity. Look at the row" in said
    assert parts(place) == []


def test_a_run_is_gone_on_with_in_another_mode(place):
    argv = flags(place, "--max_epochs", "2", "--load_checkpoint")
    run_ranks(train.main, 1, place, [*argv, "--ref_mode", "model", "--save_path", f"{place}/whole"])
    run_ranks(train.main, 1, place, [*argv, "--ref_mode", "model", "--stop_after_steps", "2"])
    said = told([*argv, "--ref_mode", "cached"], 1, place)
    assert ": 2 of 4 steps are done" in said
    assert f"the reference is {place}/model, from the cache" in said
    a, b = lines(place / "whole", "train"), lines(place / "out", "train")
    assert [line["loss"] for line in b] == pytest.approx([line["loss"] for line in a], rel=1e-5)


def test_a_run_says_that_prompts_run_once_and_has_the_numbers_of_one_where_they_do_not(place):
    for choice in ("on", "off"):
        own = ["--ref_mode", "model", "--share_prompts", choice, "--save_path", f"{place}/{choice}"]
        said = told(flags(place, *own), 2, place)
        sentence = "prompts: each runs once for all its completions, without gradient (--share_prompts on)"
        assert (sentence in said) == (choice == "on")
    assert_same_metrics(place / "on", place / "off")


def test_a_model_that_cannot_be_loaded_is_one_error_and_no_reason_against_the_cache(place):
    path = place / "model/model.safetensors"
    weights = safetensors.torch.load_file(path)
    del weights["model.norm.weight"]
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    ((code, said),) = run_ranks(run_to_status, 1, place, flags(place, *PLAIN, "--ref_mode", "auto"))
    assert code == 2
    assert "warning: the reference's cache" not in said
    assert said.count("the weights must hold every parameter of the configuration") == 1


def test_a_models_folder_without_weights_is_refused_before_the_rows_are_read(place):
    (place / "model/model.safetensors").unlink()
    ((code, said),) = run_ranks(run_to_status, 1, place, flags(place))
    assert code == 2
    (error,) = [line for line in said.splitlines() if f"{place}/model" in line]
    assert error == (
        f"error: {place}/model: must hold the model's weights; got no .safetensors and no .bin file there. Copy or "
        "download the whole model."
    )
    assert "tokenised" not in said
