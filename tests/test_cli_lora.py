"""The commands with an adapter, as a user runs them: what they leave loads in plain peft and plain transformers."""

import json
import re

import peft
import pytest
import safetensors.torch
import torch
import transformers

from openkto.commands import evaluate, merge_lora, train
from tests.helpers.commands import flags, mean_chosen, run_to_status, status
from tests.helpers.records import lines, numbers
from tests.ranks import run_ranks
from tests.text_rows import write_model

LORA = ("--lora_rank", "4", "--learning_rate", "5e-3")
FILES = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"}
IDS = torch.arange(3, 43).view(2, 20)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def with_adapter(place, folder):
    base = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    return peft.PeftModel.from_pretrained(base, folder)


@pytest.mark.parametrize("zero_stage", [*(pytest.param(n, marks=pytest.mark.slow) for n in "012"), "3"])
def test_a_run_leaves_an_adapter_that_peft_loads_with_the_same_numbers(place, zero_stage):
    run_ranks(train.main, 2, place, flags(place, *LORA, "--zero_stage", zero_stage, "--eval_at_start"))
    out = place / "out"
    first, last = lines(out, "eval")
    assert first["rewards/chosen"] == first["kl_unclamped"] == 0.0
    assert {file.name for file in out.iterdir()} >= FILES
    assert not {"model.safetensors", "config.json"} & {file.name for file in out.iterdir()}
    tensors = safetensors.torch.load_file(out / "adapter_model.safetensors")
    assert len(tensors) == 28
    assert all(tensor.numel() and bool(tensor.any()) for tensor in tensors.values())
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors
    size = (out / "adapter_model.safetensors").stat().st_size
    assert size < 0.5 * (place / "model/model.safetensors").stat().st_size
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(place / "model")
    assert mean_chosen(with_adapter(place, out), place) == pytest.approx(last["logps/chosen"], rel=1e-5)


def test_the_adapters_dtype_is_that_of_training_unless_told_otherwise(place):
    for more, dtype in (([], torch.bfloat16), (["--export_dtype", "fp32"], torch.float32)):
        run_ranks(
            train.main, 1, place, flags(place, *LORA, "--param_dtype", "bf16", "--max_steps", "1", "--overwrite", *more)
        )
        tensors = safetensors.torch.load_file(place / "out/adapter_model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    # float32 comes from the optimizer's masters: what bfloat16 cannot hold is there.
    assert any(not torch.equal(t, t.bfloat16().float()) for t in tensors.values())


def test_the_default_learning_rate_is_higher_for_an_adapter(place):
    argv = [word for word in flags(place, "--lora_rank", "4", "--max_steps", "1") if word not in ("1e-3",)]
    argv.remove("--learning_rate")
    run_ranks(train.main, 1, place, argv)
    assert "learning_rate: 1.0e-05" in (place / "out/run.yaml").read_text()


@pytest.mark.slow  # test_cli.py has one without an adapter, and test_config.py reads one back with every setting
def test_the_written_run_file_starts_the_same_run_again(place):
    run_ranks(train.main, 1, place, flags(place, *LORA, "--target_modules", "q_proj", "v_proj"))
    first = [numbers(line) for line in lines(place / "out", "train")]
    run_ranks(train.main, 1, place, ["--config", f"{place}/out/run.yaml", "--save_path", f"{place}/again"])
    assert [numbers(line) for line in lines(place / "again", "train")] == first


@pytest.mark.parametrize(
    "reference",
    [
        [],
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (["--ref_mode", "model"], ["--ref_pretrain", "{place}/model"])
        ),
    ],
)
@pytest.mark.parametrize("zero_stage", [pytest.param("2", marks=pytest.mark.slow), "3"])
def test_evaluate_takes_an_adapter_and_its_base_is_the_reference(place, reference, zero_stage):
    run_ranks(train.main, 1, place, flags(place, *LORA))
    argv = ["--pretrain", f"{place}/out", "--max_len", "128", "--eval_dataset", f"{place}/eval.jsonl"]
    argv += ["--zero_stage", zero_stage, "--output", f"{place}/e.json"]
    run_ranks(evaluate.main, 2, place, argv + [word.format(place=place) for word in reference])
    values = json.loads((place / "e.json").read_text())["eval"]
    (logged,) = lines(place / "out", "eval")
    assert values.pop("rows") == 7
    assert values["rewards/margins"] != 0.0
    assert values == pytest.approx({name: logged[name] for name in values}, rel=1e-5, abs=1e-6)


def test_training_continues_from_an_adapter(place):
    run_ranks(train.main, 1, place, flags(place, *LORA))
    before = safetensors.torch.load_file(place / "out/adapter_model.safetensors")
    argv = flags(place, "--eval_at_start", "--learning_rate", "5e-3", "--save_path", f"{place}/further")
    argv[argv.index("--pretrain") + 1] = f"{place}/out"
    run_ranks(train.main, 2, place, argv)
    further = place / "further"
    first, last = lines(further, "eval")
    assert first["logps/chosen"] == pytest.approx(lines(place / "out", "eval")[-1]["logps/chosen"], rel=1e-5)
    assert first["rewards/chosen"] == 0.0
    after = safetensors.torch.load_file(further / "adapter_model.safetensors")
    assert after.keys() == before.keys()
    assert not any(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert mean_chosen(with_adapter(place, further), place) == pytest.approx(last["logps/chosen"], rel=1e-5)


# DoRA and rsLoRA are merged in tests/models/test_merging.py, too.
MORE = [
    *(pytest.param([flag], marks=pytest.mark.slow) for flag in ("--use_dora", "--use_rslora")),
    ["--lora_modules_to_save", "lm_head"],
]


@pytest.mark.parametrize("more", MORE, ids=["dora", "rslora", "whole-head"])
def test_a_merged_model_has_the_logits_of_policy_and_adapter(place, more, capsys):
    if "lm_head" in more:
        write_model(place / "model", tie_word_embeddings=True)
    run_ranks(train.main, 2, place, flags(place, *LORA, "--zero_stage", "3", *more))
    expected = logits(with_adapter(place, place / "out"))
    base = logits(transformers.AutoModelForCausalLM.from_pretrained(place / "model"))
    assert (expected - base).abs().max() > 1e-2
    code, text = status(merge_lora.main, ["--pretrain", f"{place}/out", "--save_path", f"{place}/whole"], capsys)
    assert code == 0, text
    whole = transformers.AutoModelForCausalLM.from_pretrained(place / "whole")
    assert not hasattr(whole, "peft_config")
    torch.testing.assert_close(logits(whole), expected, rtol=0, atol=1e-4)
    assert transformers.AutoTokenizer.from_pretrained(place / "whole").chat_template
    for folder in (place / "out", place / "whole"):
        torch.testing.assert_close(logits(as_its_card_says(folder, place)), expected, rtol=0, atol=1e-4)


def as_its_card_says(folder, place):
    """Run the code of a model card, with the real places for those that it leaves to its reader; return the model."""
    card = (folder / "README.md").read_text()
    assert str(place) not in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    names: dict = {}
    exec(code.replace("path/to/this/folder", str(folder)).replace("path/to/model", str(place / "model")), names)
    assert names["tokenizer"].chat_template
    return names["model"]


def test_a_merged_model_has_its_bases_dtype_unless_told_otherwise(place, capsys):
    transformers.AutoModelForCausalLM.from_pretrained(place / "model").bfloat16().save_pretrained(place / "model")
    run_ranks(train.main, 1, place, flags(place, *LORA, "--param_dtype", "fp32", "--max_steps", "1"))
    for more, dtype in (([], torch.bfloat16), (["--export_dtype", "fp32"], torch.float32)):
        argv = ["--pretrain", f"{place}/out", "--save_path", f"{place}/whole", "--overwrite", *more]
        assert status(merge_lora.main, argv, capsys)[0] == 0
        loaded = transformers.AutoModelForCausalLM.from_pretrained(place / "whole", dtype="auto")
        assert loaded.dtype == dtype
    # The sum of a bfloat16 base and a float32 adapter is rounded once, at the end.
    base = transformers.AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    exact = peft.PeftModel.from_pretrained(base, place / "out").merge_and_unload().state_dict()
    argv = ["--pretrain", f"{place}/out", "--save_path", f"{place}/whole", "--overwrite"]
    assert status(merge_lora.main, argv, capsys)[0] == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(place / "whole", dtype="auto").state_dict()
    assert all(torch.equal(tensor, exact[name].bfloat16()) for name, tensor in merged.items())
    assert status(merge_lora.main, [*argv[:3], f"{place}/model"], capsys)[0] == 2
    code, text = status(merge_lora.main, [*argv[:3], "/proc/nothing"], capsys)
    assert code == 2
    assert "--save_path: must be a folder that can be written; got /proc/nothing" in text
    code, text = status(merge_lora.main, [*argv[:3], f"{place}/out"], capsys)
    assert code == 2
    assert "--save_path: must not be the folder of the adapter or its base model" in text


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            ["--target_modules", "q_proj", "c_attn"],
            "--target_modules: must name layers of LlamaForCausalLM; got 'c_attn'",
        ),
        (["--target_modules", "lm_head"], "--target_modules: the head cannot be adapted; got one with LoRA on it."),
        (
            ["--lora_modules_to_save", "mlp"],
            "--lora_modules_to_save: must name layers of LlamaForCausalLM; got 'mlp', a",
        ),
    ],
)
def test_a_wrong_module_is_one_sentence(place, more, sentence):
    ((code, text),) = run_ranks(run_to_status, 1, place, flags(place, "--lora_rank", "4", *more))
    assert code == 2
    assert sentence in [line for line in text.splitlines() if line.startswith("error: ")][-1]


def test_an_export_takes_the_place_of_one_of_the_other_kind(place):
    run_ranks(train.main, 1, place, flags(place, *LORA, "--max_steps", "1"))
    run_ranks(train.main, 1, place, flags(place, "--max_steps", "1", "--overwrite"))
    assert not {"adapter_config.json", "adapter_model.safetensors"} & {f.name for f in (place / "out").iterdir()}
    run_ranks(train.main, 1, place, flags(place, *LORA, "--max_steps", "1", "--overwrite"))
    assert not {"model.safetensors", "config.json"} & {f.name for f in (place / "out").iterdir()}
