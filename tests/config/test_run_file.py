"""What an evaluation takes from the run.yaml beside a model, and that a model is not compared with itself."""

import pytest

from openkto.config import reference_name
from openkto.config.flags import parse
from openkto.config.run_file import TAKEN
from openkto.errors import ConfigError

RUN = """pretrain: base
trust_remote_code: true
dataset: [rows.jsonl]
eval_dataset: [other.jsonl]
input_key: question
max_len: 512
max_samples: 3
on_bad_rows: skip
loss_type: bco
beta: 0.3
desirable_loss_weight: 1.5
undesirable_loss_weight: 1.0
learning_rate: 1.0e-06
zero_stage: 3
save_path: out
param_dtype: bf16
"""


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/run.yaml").write_text(RUN)
    return tmp_path / "out"


def evaluation(out, *more):
    return parse(["--pretrain", str(out), "--eval_dataset", "held.jsonl", *more], "evaluate")


def test_the_reference_and_the_reading_of_rows_are_those_of_the_run(out):
    config, options = evaluation(out)
    assert config.model.ref_pretrain == "base"
    assert config.model.param_dtype == "bf16"
    assert (config.data.input_key, config.data.max_len) == ("question", 512)
    assert (config.loss.loss_type, config.loss.beta, config.loss.desirable_loss_weight) == ("bco", 0.3, 1.5)
    assert options.note == (
        f"from {out}/run.yaml, as no flag says otherwise: input_key question, max_len 512, loss_type bco, beta 0.3, "
        "desirable_loss_weight 1.5, param_dtype bf16, ref_pretrain base"
    )


def test_which_rows_how_fast_and_whose_code_are_not(out):
    config, _ = evaluation(out)
    assert config.data.eval_dataset == ["held.jsonl"]
    assert (config.data.max_samples, config.data.on_bad_rows) == (1000000, "error")
    assert config.deepspeed.zero_stage == 2
    assert not config.model.trust_remote_code
    assert "trust_remote_code" not in TAKEN


def test_flags_and_a_file_of_ones_own_win(out, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("beta: 0.2\n")
    config, options = evaluation(out, "--config", str(file), "--max_len", "64", "--ref_pretrain", "another")
    assert (config.loss.beta, config.data.max_len, config.model.ref_pretrain) == (0.2, 64, "another")
    assert "beta" not in options.note.partition(": ")[2].split()


def test_an_adapters_reference_is_its_base_or_the_adapter_that_it_started_from(out, tmp_path):
    (out / "adapter_config.json").write_text("{}")
    assert evaluation(out)[0].model.ref_pretrain is None
    first = tmp_path / "first"
    first.mkdir()
    (first / "adapter_config.json").write_text("{}")
    (out / "run.yaml").write_text(RUN.replace("pretrain: base", f"pretrain: {first}"))
    assert evaluation(out)[0].model.ref_pretrain == str(first)


def test_the_reference_is_the_version_that_the_run_started_from(out):
    file = out / "run.yaml"
    file.write_text(RUN + "revision: v1\n")
    assert reference_name(evaluation(out)[0].model) == "base@v1"
    assert reference_name(evaluation(out, "--ref_pretrain", "other")[0].model) == "other"
    file.write_text(RUN + "revision: v1\nref_revision: v0\n")
    assert reference_name(evaluation(out)[0].model) == "base@v0"
    file.write_text(RUN + "revision: v1\nref_pretrain: another\n")
    assert reference_name(evaluation(out)[0].model) == "another"
    (out / "adapter_config.json").write_text("{}")  # of its base, which names its own version
    file.write_text(RUN + "revision: v1\nref_revision: v0\n")
    assert evaluation(out)[0].model.ref_revision is None


def test_two_versions_of_one_model_are_two_models():
    config, _ = parse(["--pretrain", "o/m", "--ref_revision", "v0", "--eval_dataset", "x"], "evaluate")
    assert reference_name(config.model) == "o/m@v0"


@pytest.mark.parametrize("more", [[], ["--ref_pretrain", "model"], ["--ref_pretrain", "./model"]])
def test_a_model_is_not_compared_with_itself(tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="must be what the model was trained from; got model for both"):
        parse(["--pretrain", "model", "--eval_dataset", "x", *more], "evaluate")


def test_an_adapter_is_not_compared_with_itself_as_a_model(out):
    (out / "adapter_config.json").write_text("{}")
    assert evaluation(out, "--ref_pretrain", str(out))[0].model.ref_pretrain == str(out)  # it is switched off there
    with pytest.raises(ConfigError, match="must be what the model was trained from"):
        evaluation(out, "--ref_pretrain", str(out), "--ref_mode", "model")


def test_half_precision_evaluates_at_stage_0_which_has_no_optimizer_there(out):
    config, _ = evaluation(out, "--param_dtype", "fp16", "--zero_stage", "0")
    assert config.deepspeed.zero_stage == 1


def test_an_evaluation_from_a_cache_has_no_values_by_token(out):
    with pytest.raises(ConfigError, match="cached keeps the reference's log-probabilities of whole completions"):
        evaluation(out, "--ref_mode", "cached", "--loss_type", "kto_humanline")
