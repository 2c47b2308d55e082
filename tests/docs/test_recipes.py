"""The settings files of configs/: each passes --check with a small model of its kind, and says what memory it needs."""

import logging
import sys

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from openkto.commands import train
from openkto.config.flags import parse
from openkto.errors import ConfigError
from tests.docs.snippets import ROOT
from tests.ranks import run_ranks
from tests.text_rows import byte_tokenizer, write_model, write_rows

sys.path.append(str(ROOT / "docs"))
import make_recipes

NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
RECIPES = make_recipes.recipes()
KINDS = {
    "Llama": (LlamaConfig, LlamaForCausalLM),
    "SmolLM2": (LlamaConfig, LlamaForCausalLM),
    "Qwen2.5": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with rows and a small model of each kind."""
    folder = tmp_path_factory.mktemp("recipes")
    write_rows(folder / "rows.jsonl", 12, messages=True)
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    for kind, (config, model) in KINDS.items():
        small = config(**sizes, num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=2048)
        model(small).save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
    return folder


def words(name, place, *more):
    path = ROOT / f"configs/{name}.yaml"
    kind = yaml.safe_load(path.read_text())["pretrain"].split("/")[1].split("-")[0]
    own = [
        "--config",
        path,
        "--pretrain",
        place / kind,
        "--dataset",
        place / "rows.jsonl",
        "--save_path",
        place / "out",
    ]
    return [str(word) for word in (*own, *more)]


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_passes_check(name, place, monkeypatch, caplog):
    monkeypatch.setenv("OPENKTO_CACHE", str(place / "cache"))
    caplog.set_level(logging.INFO)
    # The package that 4 bits need is not among those of the tests; its rules are tested below.
    train.main(words(name, place, "--load_in_4bit", "false", "--check"))
    assert "the configuration and the data are fine" in caplog.text
    assert "has no effect" not in caplog.text


@pytest.mark.parametrize(
    "name",
    ["8b_lora_1x24gb", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cpu_try_out", "8b_full_8x40gb"))],
)
def test_recipes_train(name, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path / "cache"))
    write_rows(tmp_path / "rows.jsonl", 12)
    for kind in KINDS:
        (tmp_path / kind).symlink_to(tmp_path / "model")
    write_model(tmp_path / "model")
    run_ranks(train.main, 2, tmp_path, words(name, tmp_path, "--max_steps", "1", "--max_len", "128"))
    saved = "adapter_model.safetensors" if "lora" in name else "model.safetensors"
    assert (tmp_path / "out" / saved).exists()


@pytest.mark.parametrize("name", [name for name in NAMES if "qlora" in name])
def test_recipes_in_4_bits_break_no_rule_where_their_package_is(name, place, monkeypatch):
    (place / "packages/bitsandbytes").mkdir(parents=True, exist_ok=True)
    (place / "packages/bitsandbytes/__init__.py").touch()
    monkeypatch.syspath_prepend(str(place / "packages"))
    assert parse(words(name, place), "train")[0].lora.load_in_4bit
    with pytest.raises(ConfigError, match="needs whole weights on each GPU"):
        parse(words(name, place, "--zero_stage", "3"), "train")


QUICK = {"1b_full_1x24gb.yaml", "8b_lora_1x24gb.yaml"}  # to count
MARKED = [r if r.name in QUICK else pytest.param(r, marks=pytest.mark.slow) for r in RECIPES]


@pytest.mark.parametrize("recipe", MARKED, ids=lambda recipe: recipe.name)
def test_a_recipe_says_its_memory_which_fits_its_card(recipe):
    text = (ROOT / "configs" / recipe.name).read_text()
    assert recipe.memory in text.splitlines()
    assert recipe.states + recipe.row + recipe.reserved <= recipe.card
    assert recipe.settings["max_tokens_per_micro_batch"] == "auto"
    assert f"configs/{recipe.name} " in text  # its own command
    assert recipe.settings["save_path"] == f"ckpt/{recipe.name.removesuffix('.yaml')}"
    assert ("lora_rank" in recipe.settings) == (recipe.way != "full")
    assert recipe.settings.get("load_in_4bit", False) == (recipe.way == "qlora")


def test_the_models_have_the_parameters_that_their_cards_state():
    """In billions, as the models' pages on the Hub give them."""
    stated = {
        "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1.71,
        "meta-llama/Llama-3.2-1B-Instruct": 1.24,
        "meta-llama/Llama-3.2-3B-Instruct": 3.21,
        "meta-llama/Llama-3.1-8B-Instruct": 8.03,
        "Qwen/Qwen3-8B": 8.19,
        "Qwen/Qwen3-14B": 14.77,
        "Qwen/Qwen2.5-32B-Instruct": 32.76,
        "meta-llama/Llama-3.3-70B-Instruct": 70.55,
    }
    assert {name: round(shape.numel / 1e9, 2) for name, shape in make_recipes.MODELS.items()} == stated
    assert {recipe.settings["pretrain"] for recipe in RECIPES} == set(stated)


def test_the_memory_of_one_recipe_by_hand():
    """Llama-3.1-8B: 8.03e9 parameters of 2 bytes; adapters of rank 16 have 41.9e6 of 18, and a bucket of 6."""
    (lora,) = [recipe for recipe in RECIPES if recipe.name == "8b_lora_1x24gb.yaml"]
    assert lora.states == pytest.approx(8.030 * 2 + 0.0419 * 24, abs=0.01)
    (in_4bit,) = [recipe for recipe in RECIPES if recipe.name == "8b_qlora_1x16gb.yaml"]
    # Qwen3-8B: 6.945e9 parameters in layers of 0.516 bytes, 1.245e9 others of 2, 43.6e6 of adapters.
    assert in_4bit.states == pytest.approx(6.945 * 0.5159 + 1.245 * 2 + 0.0436 * 24, abs=0.02)


@pytest.mark.slow
def test_the_page_lists_the_recipes():
    assert make_recipes.page() in (ROOT / "docs/recipes.md").read_text()
    assert len(RECIPES) == len(NAMES) - 1  # all but cpu_try_out
