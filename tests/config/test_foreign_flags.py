"""The names of other trainers lead to settings that exist, and a far name to none."""

import pytest

from openkto.config import settings
from openkto.config.flags import parse
from openkto.config.foreign_flags import ADVICE, RENAMED, advice_on, flags_in
from openkto.errors import ConfigError

TRAINING = ["--pretrain", "m", "--dataset", "x"]
EVALUATION = ["--pretrain", "m", "--eval_dataset", "x"]


def refusal(argv, command="train"):
    with pytest.raises(ConfigError) as error:
        parse(argv, command)
    return str(error.value)


def test_each_piece_of_advice_names_settings_that_exist_for_a_name_that_does_not():
    assert set(RENAMED.values()) <= settings().keys()
    for name, text in ADVICE.items():
        assert flags_in(text) <= settings().keys(), name
    assert not (RENAMED.keys() | ADVICE.keys()) & settings().keys()
    assert not RENAMED.keys() & ADVICE.keys()
    assert len(RENAMED) + len(ADVICE) > 50


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        ("--gradient_accumulation_steps", "There is none: --train_batch_size is the global batch of a step"),
        ("--model", "Its name here is --pretrain."),
        ("--deepspeed", "Give --zero_stage"),
        ("--warmup-steps", "Give --lr_warmup_ratio, a fraction of all steps."),
        ("--output_dir", "Its name here is --save_path."),
        ("--resume", "Its name here is --load_checkpoint."),
        ("--batch_size", "Its name here is --train_batch_size."),
        ("--device", "GPUs are used where there are any; hide them with CUDA_VISIBLE_DEVICES= before the command."),
        ("--zzz", "No flag has a similar name: see --help."),
        ("--max_lem", "The most similar name is --max_len."),
    ],
)
def test_another_trainers_flag_is_answered_with_what_to_do_here(flag, advice):
    sentence = refusal([*TRAINING, flag, "1"])
    assert sentence.startswith(f"{flag}: must be a flag of openkto train; got an unknown one. {advice}")


def test_all_flags_and_keys_of_another_trainer_are_answered_at_once(tmp_path):
    said = refusal(["--model_name_or_path", "m", "--dataset", "x", "--output_dir", "o", "--num_train_epochs", "1"])
    assert said == (
        "--model_name_or_path: must be a flag of openkto train; got an unknown one. Its name here is --pretrain. "
        "Unknown too: --output_dir: Its name here is --save_path. --num_train_epochs: Its name here is --max_epochs."
    )
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\ndataset: x\noutput_dir: o\n")
    assert refusal(["--config", str(file)]) == (
        f"{file}: model_name_or_path: must be a setting; got an unknown name. Its name here is pretrain. "
        "Unknown too: output_dir: Its name here is save_path."
    )


def test_another_trainers_key_is_answered_with_keys(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("gradient_accumulation_steps: 4\n")
    sentence = refusal(["--config", str(file)])
    assert sentence.endswith("accumulation follows from it and micro_train_batch_size.")
    assert "--" not in sentence


def test_evaluation_is_not_sent_to_a_setting_of_training():
    sentence = refusal([*EVALUATION, "--weight_decay", "0"], "evaluate")
    assert sentence.endswith("It is a setting for training only. Leave it out.")
    assert advice_on("fp16", {"param_dtype"}) == "Pass --param_dtype fp16."
