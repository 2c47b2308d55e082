"""The rules between the settings of LoRA and of the reference, and the sentence for each that is broken."""

import json

import pytest

from openkto.config import LoraConfig, ref_is_adapter
from openkto.config.flags import parse
from openkto.errors import ConfigError

TRAIN = ["--pretrain", "m", "--dataset", "rows.jsonl"]
EVALUATE = ["--pretrain", "m", "--eval_dataset", "rows.jsonl"]


@pytest.fixture
def adapter(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    return str(tmp_path / "adapter")


def refusal(*argv, command="train", needed=TRAIN):
    with pytest.raises(ConfigError) as caught:
        parse([*needed, *argv], command)
    return str(caught.value)


def test_the_flags_of_openrlhf_and_peft_are_read():
    argv = "--lora_rank 8 --lora_alpha 32 --target_modules q_proj,v_proj --lora_dropout 0.05 --use_rslora --use_dora"
    config, _ = parse([*TRAIN, *argv.split(), "--lora_modules_to_save", "lm_head"], "train")
    assert config.lora == LoraConfig(8, 32, ["q_proj", "v_proj"], 0.05, True, True, ["lm_head"])
    assert parse([*TRAIN, "--lora_rank", "8"], "train")[0].lora.target_modules == ["all-linear"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--lora_alpha 32",
            "--lora_alpha: works only with --lora_rank; got --lora_rank 0. Give a rank, such as 16, or leave it out.",
        ),
        (
            "--target_modules q v",
            "--target_modules: works only with --lora_rank; got --lora_rank 0. Give a rank, such as 16, or leave it "
            "out.",
        ),
        (
            "--lora_rank 8 --lora_dropout 1",
            "--lora_dropout: must be a number, at least 0 and below 1; got '1'. Correct it, or leave it out.",
        ),
        (
            "--ref_mode none",
            "--ref_mode: must be one of auto, model, adapter or cached; got 'none'. Correct it, or leave it out.",
        ),
        (
            "--ref_mode adapter",
            "--ref_mode: adapter needs a policy with an adapter; got none. Give --lora_rank, or take auto.",
        ),
        (
            "--lora_rank 8 --ref_mode adapter --ref_pretrain other",
            "--ref_mode: adapter takes the policy itself as the reference; got the reference other. Leave "
            "--ref_pretrain and --ref_revision out, or take model.",
        ),
        (
            "--lora_rank 8 --load_in_4bit --zero_stage 3",
            "--load_in_4bit: needs whole weights on each GPU; got --zero_stage 3, which shards them. Take "
            "--zero_stage 2, or leave it out.",
        ),
    ],
)
def test_what_does_not_go_together_is_one_sentence(flags, sentence, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert refusal(*flags.split()) == sentence


def test_4bit_says_which_package_it_lacks(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refusal("--lora_rank", "8", "--load_in_4bit") == (
        "--load_in_4bit: needs the package bitsandbytes; got a Python without it. Run pip install bitsandbytes, or "
        "leave it out."
    )


def test_an_adapter_that_training_starts_from_has_its_own_settings(adapter):
    assert parse(["--pretrain", adapter, *TRAIN[2:], "--lora_dropout", "0.1"], "train")[0].lora.lora_dropout == 0.1
    assert refusal("--lora_rank", "8", needed=["--pretrain", adapter, *TRAIN[2:]]) == (
        f"--lora_rank: must be left out, as training starts from the adapter {adapter}, which has its own; got 8. "
        "Leave it out, or start from the base model."
    )


def test_the_reference_is_the_policy_with_its_adapter_off_unless_another_is_named(adapter):
    def is_own(*flags, command="train", needed=TRAIN, has_adapter=True):
        config, _ = parse([*needed, *flags], command)
        return ref_is_adapter(config.model, has_adapter=has_adapter)

    assert not is_own(has_adapter=False)
    assert is_own("--lora_rank", "8")
    assert is_own("--lora_rank", "8", "--ref_pretrain", "m")
    assert not is_own("--lora_rank", "8", "--ref_pretrain", "other")
    assert not is_own("--lora_rank", "8", "--ref_mode", "model")
    assert is_own("--ref_mode", "adapter", command="evaluate", needed=["--pretrain", adapter, *EVALUATE[2:]])
    assert "needs a policy with an adapter" in refusal("--ref_mode", "adapter", command="evaluate", needed=EVALUATE)


def test_offloading_a_reference_that_is_not_there_is_said():
    _, options = parse([*TRAIN, "--lora_rank", "8", "--ref_offload"], "train")
    (warning,) = options.warnings
    assert warning.startswith("--ref_offload: has no effect")


def test_merging_takes_an_adapter_and_a_folder(adapter):
    config, _ = parse(["--pretrain", adapter, "--save_path", "whole"], "merge_lora")
    assert (config.model.pretrain, config.output.save_path) == (adapter, "whole")
    assert refusal(command="merge_lora", needed=["--pretrain", "m", "--save_path", "x"]) == (
        "--pretrain: must be the folder of an adapter, with its adapter_config.json; got 'm'. Name the --save_path of "
        "a run with --lora_rank."
    )
    assert refusal(command="merge_lora", needed=["--pretrain", adapter]).startswith("--save_path: is required")
    for flag, what in (("--beta", "train and evaluate"), ("--lora_rank", "training")):
        sentence = f"{flag}: belongs to {what}; got it for merge_lora. Leave it out."
        assert refusal(flag, "1", command="merge_lora", needed=[]) == sentence


def test_evaluate_has_no_use_for_the_settings_of_an_adapter():
    sentence = "--lora_rank: belongs to training; got it for evaluate. Leave it out."
    assert refusal("--lora_rank", "8", command="evaluate", needed=EVALUATE) == sentence
