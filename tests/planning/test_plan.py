"""`openkto plan`: what it prints, what given flags do to it, and its answers to bad input."""

import json

import pytest
import transformers

from openkto.commands.data import training_set
from openkto.commands.outlook import outlook_warnings
from openkto.commands.plan import main
from openkto.commands.rows import load_tokenizer_of
from openkto.config.flags import parse
from openkto.errors import ConfigError, DataError
from tests.text_rows import write_model, write_rows


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()  # a configuration is enough
    write_rows(tmp_path / "rows.jsonl", 40)
    return ["--pretrain", str(tmp_path / "model"), "--dataset", str(tmp_path / "rows.jsonl")]


def plan_of(words, capsys):
    main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_a_plan_names_parts_time_and_the_command(words, capsys):
    machine = ["--gpus", "8", "--gpu_memory", "80", "--tflops", "100"]
    found = plan_of([*words, *machine, "--train_batch_size", "8"], capsys)
    chosen = found["recommended"]
    assert found["steps"] == 5
    assert sum(chosen["parts"].values()) == pytest.approx(chosen["bytes"])
    assert min(chosen["seconds_a_step"], chosen["hours"]) > 0
    assert {one["zero_stage"] for one in found["choices"]} == {0, 1, 2, 3}
    assert found["command"] == (
        f"deepspeed --num_gpus 8 --module openkto train {' '.join(words)} --train_batch_size 8 --zero_stage 1 "
        "--ref_mode cached"
    )
    main([*words, *machine, "--train_batch_size", "8"])
    said = capsys.readouterr().out
    assert "recommended: all parameters, ZeRO 1, reference: cached" in said
    seconds = 3600 * chosen["hours"]
    assert f"the run: 5 steps, {seconds:.2g} seconds, without evaluations" in said


def test_given_flags_stay_and_are_not_repeated(words, capsys):
    given = ["--zero_stage", "3", "--gradient_checkpointing", "--lora_rank", "4"]
    found = plan_of([*words, "--gpus", "2", "--gpu_memory", "80", *given], capsys)
    kinds = {(one["trains"], one["zero_stage"], one["gradient_checkpointing"]) for one in found["choices"]}
    assert kinds == {("LoRA", 3, "whole")}
    assert found["command"].endswith(" ".join([*words, *given]))
    assert found["recommended"]["seconds_a_step"] is None  # nothing is known of that GPU


def test_a_key_in_an_address_is_not_in_the_command(words, capsys):
    # Without rows to train on none are read.
    address = ["--eval_dataset", "held=https://me:s3cret'@host/rows.csv?sig=s3cret"]
    found = plan_of([*words[:2], "--gpus", "2", "--gpu_memory", "80", "--lora_rank", "4", *address], capsys)
    assert "--eval_dataset 'held=https://***@host/rows.csv?sig=***'" in found["command"]
    assert "s3cret" not in found["command"]


def test_offload_at_stage_1_is_looked_at_where_it_is_asked_for(words, capsys):
    given = ["--adam_offload", "--zero_stage", "1", "--lora_rank", "0", "--gradient_checkpointing", "false"]
    found = plan_of([*words[:2], "--gpus", "1", "--gpu_memory", "80", "--ref_mode", "cached", *given], capsys)
    (one,) = found["choices"]
    assert (one["zero_stage"], one["parts"]["optimizer"]) == (1, 0.0)
    assert one["offloaded_bytes"] == 16 * found["parameters"]["full"]["trained"]


def test_a_plan_warns_of_what_the_run_would_warn_of(words, capsys, caplog, tmp_path):
    write_rows(tmp_path / "held.jsonl", 4)
    given = [*words, "--desirable_loss_weight", "9", "--early_stop_patience", "3", "--lora_rank", "0"]
    given += ["--eval_dataset", str(tmp_path / "held.jsonl"), "--keep_best", "loss", "--eval_steps", "1"]
    plan_of([*given, "--gpus", "1", "--gpu_memory", "80"], capsys)
    config, _ = parse(given, "train")
    rows = training_set(config, load_tokenizer_of(config, words[1]))
    expected = outlook_warnings(config, len(rows))
    said = [record.getMessage().removeprefix("warning: ") for record in caplog.records if record.levelname == "WARNING"]
    assert expected[0].startswith("the run has 1 step")
    assert expected[1].startswith("--early_stop_patience 3: the run has 1 evaluations")
    assert set(expected) < set(said)
    assert any("is outside [1, 4/3]" in line for line in said)
    assert any(line.startswith("z_ref of the evaluation set held is a mean over 4") for line in said)
    assert any(
        line.startswith("the evaluation set held: 4 of its 4 rows have a prompt that is trained on") for line in said
    )


def test_a_plan_refuses_what_the_run_would_refuse(words, tmp_path):
    write_rows(tmp_path / "one.jsonl", 1)
    with pytest.raises(DataError, match="got a set of one row"):
        main([*words[:2], "--dataset", str(tmp_path / "one.jsonl")])
    with pytest.raises(ConfigError, match="--save_path: must not be the folder of a model"):
        main([*words, "--save_path", words[1]])


def test_without_rows_each_has_the_longest_length(words, capsys):
    found = plan_of([*words[:2], "--gpus", "1", "--gpu_memory", "80", "--max_len", "100", "--lora_rank", "0"], capsys)
    assert found["largest_micro_batch"]["full"] == {"rows": 1, "length": 800, "scored": 400}
    assert found["steps"] is None
    assert "--dataset ROWS" in found["command"]


def test_a_model_that_cannot_run_without_data_is_refused_in_a_sentence(tmp_path):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.MixtralConfig(**shape, num_key_value_heads=2, vocab_size=61).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="--pretrain: the model must run on torch's meta device"):
        main(["--pretrain", str(tmp_path), "--param_dtype", "fp32", "--gpus", "1", "--gpu_memory", "80"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gpus", "8"], "--gpu_memory: is needed with --gpus"),
        (["--gpus", "8", "--gpu_memory", "0"], "--gpu_memory: must be a number above 0"),
        (["--gpu_memory", "1", "--micro_train_batch_size", "1", "--lora_rank", "0"], "The nearest is "),
        (["--adam_offload"], "--adam_offload: moves memory from a GPU"),
        (["--tensor_parallel_size", "2"], "--tensor_parallel_size: must be 1 for a plan"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(words, more, said):
    with pytest.raises(ConfigError, match=said):
        main([*words[:2], *more])
