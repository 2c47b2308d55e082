"""The commands as a user runs them: what they leave, their exit status, their one sentence."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from openkto.commands import build, evaluate, inspect, train
from openkto.commands.data import evaluation_sets
from openkto.commands.run import run
from openkto.config.flags import parse
from openkto.errors import StopError
from openkto.process.stops import StopRequest
from openkto.process.watchdog import Watchdog
from tests.helpers.commands import flags, mean_chosen, run_to_status, status
from tests.helpers.records import batches, lines, numbers
from tests.ranks import run_ranks
from tests.text_rows import write_rows
from tests.tiny import tiny_llama

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


def test_a_run_leaves_a_model_that_transformers_loads_with_the_same_numbers_and_answers(place):
    (place / "asked.txt").write_text("Why is 9 odd?\n")
    more = ["--num_samples", "3", "--sample_prompts", f"{place}/asked.txt", "--sample_max_new_tokens", "12"]
    run_ranks(train.main, 2, place, flags(place, "--zero_stage", "3", "--eval_at_start", *more))
    out = place / "out"
    first, last = lines(out, "eval")
    assert first["rewards/margins"] == 0.0
    assert last["loss"] != first["loss"]
    assert lines(out, "run")[0]["world_size"] == 2

    base = transformers.AutoConfig.from_pretrained(place / "model").to_dict()
    config = transformers.AutoConfig.from_pretrained(out).to_dict()
    assert {name for name in base if base[name] != config[name]} <= {"_name_or_path"}
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template
    # The exported model's mean log-probability of the desirable rows is the one that the run logged.
    assert last["logps/chosen"] == pytest.approx(mean_chosen(model, place), rel=1e-5)
    # And so are the run's last greedy answers.
    answers = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    last = answers[-4:]
    assert [line["source"] for line in last] == ["asked.txt", "eval", "eval", "eval"]
    assert {line["step"] for line in answers} == {0, last[0]["step"]}
    assert [line["prompt"] for line in last[:2]] == [
        f"<|user|>{text}<|assistant|>" for text in ("Why is 9 odd?", "Is 0 even?")
    ]
    assert (last[1]["completion"], last[1]["label"]) == ("Yes.", False)
    for line in last:
        ids = tokenizer(line["prompt"], return_tensors="pt", add_special_tokens=False)["input_ids"]
        made = model.generate(input_ids=ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
        assert tokenizer.decode(made).removesuffix("</s>") == line["greedy"]


def test_the_written_run_file_starts_the_same_run_again(place):
    run_ranks(train.main, 1, place, flags(place))
    first = [numbers(line) for line in lines(place / "out", "train")]
    run_ranks(train.main, 1, place, ["--config", f"{place}/out/run.yaml", "--save_path", f"{place}/again"])
    assert [numbers(line) for line in lines(place / "again", "train")] == first


def test_evaluate_gives_the_numbers_of_the_run_that_made_the_model(place):
    run_ranks(train.main, 1, place, flags(place))
    (logged,) = lines(place / "out", "eval")
    # Reference, max_len, beta and the like are those of out/run.yaml.
    argv = ["--pretrain", f"{place}/out", "--eval_dataset", f"{place}/eval.jsonl"]
    for more in ([], ["--ref_mode", "cached", "--ref_cache_dir", f"{place}/ref"]):
        run_ranks(evaluate.main, 2, place, argv + more)
        values = json.loads((place / "out/evaluation.json").read_text())["eval"]
        assert values.pop("rows") == 7
        assert values == pytest.approx({name: logged[name] for name in values}, rel=1e-5, abs=1e-6)
    assert list((place / "ref").rglob("*"))


class StopsRankOne:
    """A watchdog's stand-in that asks rank 1 to stop at the third forward."""

    def __init__(self, stop):
        self.stop, self.beats = stop, 0

    def phase(self, name):
        pass

    def beat(self):
        self.beats += 1
        if self.beats == 3 and os.environ["RANK"] == "1":
            self.stop.reason = "SIGUSR1"


def evaluate_until_stopped(argv):
    config, options = parse(argv, "evaluate")
    stop = StopRequest()
    watchdog = StopsRankOne(stop)
    with pytest.raises(StopError) as error:
        evaluate.evaluate(config, options, stop, watchdog)
    return str(error.value), watchdog.beats


def test_a_signal_to_one_rank_ends_an_evaluation_on_all_between_two_forwards(place):
    shutil.copytree(place / "model", place / "same")
    argv = ["--pretrain", f"{place}/model", "--ref_pretrain", f"{place}/same", "--eval_dataset", f"{place}/eval.jsonl"]
    sentence = "SIGUSR1 on rank 1: the evaluation has no numbers yet. Start the same command again."
    argv += ["--max_len", "128", "--micro_train_batch_size", "1"]
    assert run_ranks(evaluate_until_stopped, 2, place, argv) == [(sentence, 3)] * 2


def attention_lengths_of_an_evaluation(argv):
    config, _ = parse(argv, "evaluate")
    names, tokenizer = evaluate.find_models(config)
    strategy = build.make_strategy(config)
    strategy.setup_distributed()
    loaders = list(build.make_eval_loaders(config, strategy, evaluation_sets(config, tokenizer)).values())
    evaluate.prepare_models(config, strategy, names, {}, loaders, Watchdog(0, 0), StopRequest())
    return [loader.layout.attention_length for loader in loaders]


def test_an_evaluation_is_planned_with_the_cost_of_attention(place):
    shutil.copytree(place / "model", place / "same")
    argv = ["--pretrain", f"{place}/model", "--ref_pretrain", f"{place}/same", "--eval_dataset", f"{place}/eval.jsonl"]
    ((length,),) = run_ranks(attention_lengths_of_an_evaluation, 1, place, [*argv, "--max_len", "128"])
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    # Where length x hidden is as much as a layer's weights, of which two layers have these.
    weights = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    assert length == pytest.approx(weights / (2 * model.config.hidden_size), rel=1e-6)


def test_evaluate_can_check_its_rows_and_show_them(place, capsys):
    shutil.copytree(place / "model", place / "same")
    argv = ["--pretrain", f"{place}/model", "--ref_pretrain", f"{place}/same", "--eval_dataset", f"{place}/eval.jsonl"]
    code, text = status(evaluate.main, [*argv, "--preview", "1", "--save_path", f"{place}/no"], capsys)
    assert code == 0
    assert "Is 0 even?" in text
    assert not (place / "no/evaluation.json").exists()


def test_several_evaluation_sets_are_told_apart_by_name(place):
    write_rows(place / "other.jsonl", 5)
    sets = ["--eval_dataset", f"{place}/eval.jsonl", f"second={place}/other.jsonl"]
    run_ranks(
        train.main, 2, place, [*flags(place, "--max_steps", "1")[:4], *sets, *flags(place, "--max_steps", "1")[6:]]
    )
    assert [line["eval_set"] for line in lines(place / "out", "eval")] == ["eval", "second"]


def test_a_bfloat16_run_exports_bfloat16_unless_told_otherwise(place):
    run_ranks(train.main, 1, place, flags(place, "--param_dtype", "bf16", "--max_steps", "1"))
    assert transformers.AutoModelForCausalLM.from_pretrained(place / "out", dtype="auto").dtype == torch.bfloat16
    more = ["--export_dtype", "fp32", "--overwrite"]
    run_ranks(train.main, 1, place, flags(place, "--param_dtype", "bf16", "--max_steps", "1", *more))
    assert transformers.AutoModelForCausalLM.from_pretrained(place / "out", dtype="auto").dtype == torch.float32


def test_auto_weights_bring_the_ratio_to_one(place, capsys):
    run_ranks(train.main, 1, place, flags(place, "--undesirable_loss_weight", "auto", "--max_steps", "1"))
    assert "undesirable_loss_weight: 1.8571428571428572" in (place / "out/run.yaml").read_text()  # 13 rows against 7


@pytest.mark.parametrize(
    ("more", "code", "sentence"),
    [
        (["--learning_rat", "1"], 2, "learning_rate"),
        (["--beta", "-1"], 2, "--beta"),
        (["--train_batch_size", "1"], 2, "--train_batch_size"),
        (
            ["--pretrain", "/nowhere/model"],
            2,
            "--pretrain: must be a Hugging Face name or a folder that exists; got '/nowhere/model'",
        ),
        (["--lora_rank", "-8"], 2, "--lora_rank"),
        (["--max_steps", "1e30"], 2, "--max_steps"),
        (["--train_batch_size", "99999999999999999999"], 2, "--train_batch_size"),
        (["--learning_rate", "1e38"], 2, "--learning_rate"),
        (["--aux_loss_coef", "0.1"], 2, "--aux_loss_coef: needs a mixture-of-experts model"),
        (["--attn_implementation", "flash_attention_2"], 2, "--attn_implementation"),
        (["--use_wandb", "0123456789abcdef"], 2, "WANDB_API_KEY"),
    ],
)
def test_what_is_wrong_is_one_sentence_with_its_exit_status(place, more, code, sentence, capsys):
    got, text = status(train.main, flags(place, *more), capsys)
    assert got == code
    (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert sentence in error
    assert "0123456789abcdef" not in text


def test_a_bad_row_is_named_with_file_and_line(place, capsys):
    with (place / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "a", "completion": "b", "label": "maybe"}\n')
    code, text = status(train.main, flags(place, "--check"), capsys)
    assert code == 3
    assert f"error: {place}/rows.jsonl:21: " in text
    assert "maybe" in text


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_bad_row_in_a_real_run_is_the_same_sentence_on_every_rank(place, world_size, monkeypatch):
    with (place / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "a", "completion": "", "label": true}\n')
    for code, text in run_ranks(run_to_status, world_size, place, flags(place)):
        assert code == 3
        assert text.splitlines()[-1].startswith(f"error: {place}/rows.jsonl:21: ")


def test_evaluate_of_a_model_against_its_copy_is_zero_in_bfloat16_at_every_stage(place):
    shutil.copytree(place / "model", place / "same")
    common = ["--pretrain", f"{place}/model", "--max_len", "128", "--eval_dataset", f"{place}/eval.jsonl"]
    common += ["--ref_pretrain", f"{place}/same"]
    for stage in ("0", "3"):
        argv = [*common, "--param_dtype", "bf16", "--zero_stage", stage, "--output", f"{place}/e.json"]
        run_ranks(evaluate.main, 2, place, argv)
        values = json.loads((place / "e.json").read_text())["eval"]
        assert values["rewards/chosen"] == values["kl_unclamped"] == 0.0


def test_a_pad_token_beyond_the_embeddings_still_trains(place):
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "model")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(place / "model")
    run_ranks(train.main, 1, place, flags(place, "--max_steps", "1"))
    assert lines(place / "out", "train")


def train_in_own_folder(argv, folder):
    here = Path(folder) / os.environ["RANK"]
    here.mkdir()
    os.chdir(here)
    train.main(argv)


def test_nodes_need_no_common_save_path(place):
    argv = [*flags(place, "--max_steps", "1", "--disable_ds_ckpt")]
    argv[argv.index("--save_path") + 1] = "out"
    run_ranks(train_in_own_folder, 2, place, argv, str(place))
    assert (place / "0/out/model.safetensors").exists()
    assert not (place / "1/out").exists()


@pytest.mark.parametrize("folder", ["/proc/nothing", pytest.param("x" * 300, marks=pytest.mark.slow)])
def test_a_save_path_that_cannot_be_written_is_the_same_sentence_on_every_rank(place, folder):
    for code, text in run_ranks(run_to_status, 2, place, flags(place, "--save_path", folder)):
        assert code == 2
        assert f"--save_path: must be a folder that can be written; got {folder}" in text


def test_weights_that_are_not_finite_are_not_saved(place):
    argv = flags(place, "--max_steps", "1", "--l2", "1e300", "--learning_rate", "5e-5", "--eval_steps", "0")
    for code, text in run_ranks(run_to_status, 2, place, argv):
        assert code == 1
        assert "error: the trained weights: must be finite in float32; got nan or infinity in " in text
    assert not (place / "out/model.safetensors").exists()


def test_another_run_in_the_folder_keeps_the_first_ones_records(place):
    run_ranks(train.main, 1, place, flags(place, "--max_steps", "1", "--beta", "0.3"))
    (place / "out/tensorboard").mkdir()
    run_ranks(train.main, 1, place, flags(place, "--max_steps", "1", "--beta", "0.7", "--overwrite"))
    assert "beta: 0.3" in (place / "out/run.1.yaml").read_text()
    assert "beta: 0.7" in (place / "out/run.yaml").read_text()
    assert (place / "out/tensorboard.1").is_dir()


def test_a_refused_run_leaves_the_run_file_of_a_finished_one(place, capsys):
    run_ranks(train.main, 1, place, flags(place, "--max_steps", "1"))
    before = (place / "out/run.yaml").read_text()
    write_rows(place / "one.jsonl", 1)
    argv = flags(place, "--beta", "0.7", "--max_steps", "1", "--overwrite")
    argv[argv.index("--eval_dataset") + 1] = f"{place}/one.jsonl"
    ((code, text),) = run_ranks(run_to_status, 1, place, argv)
    assert code == 3
    assert f"error: the evaluation set one ({place}/one.jsonl): z_ref is estimated from pairs of different rows" in text
    assert (place / "out/run.yaml").read_text() == before


def test_a_model_that_cannot_be_saved_in_its_place_is_saved_elsewhere(place, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(place / "refuge"))
    (place / "refuge").mkdir()
    ((code, text),) = run_ranks(run_on_a_disk_that_fills_up, 1, place, flags(place, "--max_steps", "1"))
    assert code == 1
    (refuge,) = (place / "refuge").glob("openkto-*")
    assert f"The trained model was saved to {refuge} instead" in text
    assert transformers.AutoModelForCausalLM.from_pretrained(refuge)
    # Where that cannot be done either, both reasons are said, and the checkpoint of the last step serves.
    argv = flags(place, "--max_steps", "1", "--save_steps", "1", "--overwrite")
    ((code, text),) = run_ranks(run_on_a_disk_that_fills_up, 1, place, argv, ["/out/", "/refuge/"])
    assert code == 1
    assert text.count("No space left on device") == 2
    assert "Nor could it be saved to a temporary folder" in text
    assert list((place / "refuge").glob("openkto-*")) == [refuge]
    assert run_ranks(run_to_status, 1, place, [*argv[:-1], "--load_checkpoint"])[0][0] == 0
    assert (place / "out/model.safetensors").exists()


def run_on_a_disk_that_fills_up(argv, full=("/out/",)):
    save = transformers.PreTrainedModel.save_pretrained

    def save_unless_full(model, folder, **kwargs):
        if any(place in str(folder) for place in full):
            raise OSError(28, "No space left on device")
        save(model, folder, **kwargs)

    transformers.PreTrainedModel.save_pretrained = save_unless_full
    return run_to_status(argv)


def test_a_missing_file_is_named(place, capsys):
    (place / "rows.jsonl").unlink()
    code, text = status(train.main, flags(place, "--check"), capsys)
    assert code == 3
    assert f"error: {place}/rows.jsonl: must be an existing file" in text


def test_check_reads_everything_and_trains_nothing(place, capsys, caplog):
    (place / "model/model.safetensors").unlink()  # no weights are looked at
    code, _ = status(train.main, flags(place, "--check", "--lora_rank", "2"), capsys)
    assert code == 0
    assert not (place / "out").exists()
    said = caplog.messages
    assert any(re.match(r"the adapter is on .*\d q_proj.*; \d+ parameters train, of \d+", line) for line in said)
    assert len(said) <= 24  # a screen
    for line in (
        f"models: trained: an adapter of rank 2 on {place}/model (llama); the reference: the policy at the start of "
        "training",
        "data: 20 rows: 13 desirable, 7 undesirable",
        "steps: 3, 1 epoch of 20 rows, 4 to 8 rows a step, 1 of warm-up, learning rate up to 0.001",
        "evaluation set eval:",
        "data: 7 rows: 4 desirable, 3 undesirable",
    ):
        assert line in said
    assert any(line.startswith("tokens: prompts ") for line in said)
    assert any(line.startswith("warning: the run has 3 steps") for line in said)


def test_what_cannot_be_paired_apart_is_said_before_training(place, capsys, caplog):
    texts = ["Yes."] * 12 + [f"No, it is {i}." for i in range(4)]
    rows = [{"prompt": f"Is {i} even?", "completion": t, "label": i % 2 == 0} for i, t in enumerate(texts)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for more, warned in ((), True), (("--loss_type", "apo_zero_unpaired"), False):
        caplog.clear()
        assert status(train.main, flags(place, "--check", "--train_batch_size", "16", *more), capsys)[0] == 0
        text = "8 of 16 mismatched pairs of an epoch (50.0%) hold a row's own prompt or completion, whoever is paired"
        assert (text in caplog.text) == warned


def test_an_end_of_turn_at_which_the_model_does_not_stop_is_said_and_exported(place, capsys, caplog):
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ eos_token }}", "<|end|>")
    tokenizer.save_pretrained(place / "model")
    model = tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=256)
    model.save_pretrained(place / "model")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    write_rows(place / "rows.jsonl", 8, messages=True)
    ((code, text),) = run_ranks(run_to_status, 1, place, flags(place, "--max_steps", "1"))
    assert code == 0, text
    assert f"rows end with <|end|> (id {end}), at which the model's generation does not stop" in text
    generation = json.loads((place / "out/generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, end]
    assert (
        status(train.main, flags(place, "--check", "--pretrain", f"{place}/out", "--save_path", f"{place}/b"), capsys)[
            0
        ]
        == 0
    )
    assert "does not stop" not in caplog.text


def test_plain_prompts_that_get_no_chat_template_are_warned_of_once_with_the_flag_that_helps(place, capsys, caplog):
    for command, more in ((train.main, "--check"), (inspect.main, f"--output={place}/page.html")):
        caplog.clear()
        code, _ = status(command, flags(place, more, "--apply_chat_template", "false"), capsys)
        assert code == 0
        (warning,) = [message for message in caplog.messages if "stays one although the tokenizer has" in message]
        assert "--apply_chat_template wraps such prompts" in warning
        caplog.clear()
        status(command, flags(place, more), capsys)
        assert "stays one although" not in caplog.text


def test_preview_shows_labels_and_the_completion(place, capsys):
    code, text = status(train.main, flags(place, "--preview", "2"), capsys)
    assert code == 0
    assert "Is 1 even?" in text
    assert "No, 1 is odd." in text


def test_verbose_logs_what_a_log_of_one_screen_leaves_out(monkeypatch):
    for more, level, of_library in (
        (["--verbose"], logging.DEBUG, None),
        (["--verbose", "true"], logging.DEBUG, None),
        (["--verbose=false"], logging.INFO, "error"),
        ([], logging.INFO, "error"),
    ):
        monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "none yet")
        monkeypatch.delenv("TRANSFORMERS_VERBOSITY")
        assert run(lambda argv: None, ["--pretrain", "model", *more]) == 0
        assert logging.getLogger("openkto").level == level
        assert os.environ.get("TRANSFORMERS_VERBOSITY") == of_library


def assert_fits_a_screen(said):
    """See that a run's log says what matters, in few lines, each of which is the run's own."""
    beginnings = ("warning:", "tokenised", "evaluation", "classes:", "tokens:", "steps:", "checkpoints:", "step ")
    beginnings += ("data:", "reference: ", "the reference is", "the model is in", "ended at step", "mismatched pairs:")
    # A start on a busy machine also says what it is at.
    shown = [line for line in said.splitlines() if not line.startswith("start-up: ")]
    assert len(shown) <= 25, said
    assert [line for line in shown if not line.startswith(beginnings)] == []
    assert sum(line.startswith("step ") for line in shown) == 3


def launch(place, *command, env=None):
    environment = {**os.environ, **(env or {}), "PATH": f"{BIN}:{os.environ['PATH']}", "TORCHDYNAMO_DISABLE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)


DEEPSPEED = ("deepspeed", "--num_gpus", "2", "cli/train_kto.py")


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--max_time", "0:00:00:01"], 75, "stopped after step 1 of 3"),  # over when the first step is made
        pytest.param([], 0, "step 3/3", marks=pytest.mark.slow),
    ],
    ids=["stopped", "finished"],
)
def test_the_deepspeed_launcher_starts_ranks_that_share_tokens_and_passes_their_exit_status_on(place, more, code, said):
    argv = flags(place, "--sequence_parallel_size", "2", "--zero_stage", "3", "--ref_mode", "model", "--log_batches")
    done = launch(place, *DEEPSPEED, *argv, *more, env={"WANDB_API_KEY": "SECRET123", "HF_TOKEN": "SECRET123"})
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    (start,), (first, *_) = lines(place / "out", "run"), lines(place / "out", "train")
    assert start["world_size"] == 2
    assert first["loss"] == 0.5
    assert first["consumed_samples"] == len(batches(place / "out")[0]["rows"]) == 8  # no rank had rows of its own
    written = [p.read_bytes() for p in (place / "out").rglob("*") if p.is_file()]
    assert not any(b"SECRET123" in content for content in [*written, done.stdout.encode(), done.stderr.encode()])


@pytest.mark.slow
def test_the_deepspeed_launcher_passes_the_status_of_a_wrong_flag_on(place):
    wrong = launch(place, *DEEPSPEED, *flags(place, "--zero_stage", "9"))
    assert wrong.returncode == 2
    assert "--zero_stage" in wrong.stderr


@pytest.mark.slow  # the installed command, and a log of one screen, are in test_wheel.py and test_walk.py, too
def test_torchrun_and_the_installed_command_run_too(place):
    alone = launch(place, BIN / "openkto", "train", *flags(place))
    assert alone.returncode == 0, alone.stderr
    assert_fits_a_screen(alone.stdout + alone.stderr)
    expected = [numbers(line) for line in lines(place / "out", "train")]
    done = launch(
        place,
        "torchrun",
        "--nproc_per_node",
        "2",
        "--module",
        "openkto",
        "train",
        *flags(place, "--save_path", f"{place}/t"),
    )
    assert done.returncode == 0, done.stderr
    for line, other in zip(expected, [numbers(x) for x in lines(place / "t", "train")], strict=True):
        line.pop("padding_fraction"), other.pop("padding_fraction")
        assert other == pytest.approx(line, rel=1e-4, abs=1e-4)


def test_check_finds_a_ds_config_that_contradicts_the_run(place, capsys):
    (place / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 3}}')
    code, text = status(train.main, flags(place, "--ds_config", f"{place}/ds.json", "--check"), capsys)
    assert code == 2
    assert "zero_optimization.stage" in text
    (place / "ds.json").write_text('{"train_batch_size": 8, "gradient_clipping": "auto"}')
    assert status(train.main, flags(place, "--ds_config", f"{place}/ds.json", "--check"), capsys)[0] == 0


def test_held_out_rows_are_evaluated_on_and_never_trained_on(place):
    argv = flags(place, "--eval_fraction", "0.3", "--log_batches", "--max_epochs", "2", "--ref_mode", "cached")
    del argv[argv.index("--eval_dataset") : argv.index("--eval_dataset") + 2]
    run_ranks(train.main, 2, place, argv)
    split = json.loads((place / "out/eval_split.json").read_text())
    assert 0 < len(split["rows"]) < 20
    trained = {row for step in batches(place / "out") for row in (*step["rows"], *step["kl_rows"])}
    assert trained == set(range(20)) - set(split["rows"])
    state, *_ = (place / "out/checkpoints").glob("*/state.json")
    assert json.loads(state.read_text())["identity"]["eval_fraction"] == 0.3
    # Later it can be evaluated on the same rows, by the file alone.
    logged = lines(place / "out", "eval")[-1]
    argv = ["--pretrain", f"{place}/out", "--eval_dataset", f"held={place}/out/eval_split.json"]
    (said,) = run_ranks(run_to_status, 1, place, argv, evaluate.main)
    assert said[0] == 0, said
    found = json.loads((place / "out/evaluation.json").read_text())["held"]
    assert found["rows"] == len(split["rows"])
    for metric in ("loss", "logps/chosen", "logps/rejected"):
        assert found[metric] == pytest.approx(logged[metric], rel=1e-5), metric


def test_a_full_gpu_is_told_with_what_takes_less(monkeypatch, capsys):
    def fill(argv):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(sys, "argv", ["openkto"])
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")  # `run` sets it where it is not
    assert run(fill, []) == 1
    told = capsys.readouterr().err
    for cure in (
        "--micro_train_batch_size",
        "--max_len",
        "--gradient_checkpointing",
        "--share_prompts off",
        "--zero_stage",
    ):
        assert cure in told
