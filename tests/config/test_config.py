"""The settings: defaults, the YAML that restarts a run, and what is said to OpenRLHF's users."""

import runpy
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from openkto.config import (
    FLOORED_SCHEDULES,
    LR_SCHEDULERS,
    METRIC_SCHEDULERS,
    SECTIONS,
    DataConfig,
    LoraConfig,
    ModelConfig,
    Option,
    RunConfig,
    eval_sets,
    from_flat,
    openrlhf_differences,
    path_of_entry,
    settings,
    split_eval_set,
    to_flat,
    to_yaml,
    with_resolved,
)
from openkto.config.checks import check
from openkto.config.flags import parse
from openkto.config.values import kind_of
from openkto.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent


def test_defaults_are_those_of_the_flags_page():
    flat = to_flat(RunConfig(ModelConfig("m")))
    assert {name: value for name, value in flat.items() if value not in (None, []) and value is not False} == {
        "pretrain": "m",
        "ref_mode": "auto",
        "lora_rank": 0,
        "lora_alpha": 16,
        "target_modules": ["all-linear"],
        "lora_dropout": 0.0,
        "attn_implementation": "auto",
        "dataset_split": "train",
        "eval_split": "test",
        "max_samples": 1000000,
        "label_key": "label",
        "max_len": 2048,
        "truncation": "completion",
        "on_bad_rows": "error",
        "loss_type": "kto",
        "beta": 0.1,
        "desirable_loss_weight": 1.0,
        "undesirable_loss_weight": 1.0,
        "label_smoothing": 0.0,
        "sft_loss_coef": 0.0,
        "humanline_low": -1.0,
        "humanline_high": 1.5,
        "aux_loss_coef": 0.0,
        "lr_scheduler": "cosine_with_min_lr",
        "lr_warmup_ratio": 0.03,
        "min_lr_ratio": 0.1,
        "l2": 0.0,
        "adam_betas": (0.9, 0.95),
        "max_norm": 1.0,
        "zero_stage": 2,
        "zpg": 1,
        "tensor_parallel_size": 1,
        "sequence_parallel_size": 1,
        "ref_sync_steps": 0,
        "ref_sync_alpha": 0.6,
        "local_rank": -1,
        "train_batch_size": 128,
        "packing": "auto",
        "share_prompts": "auto",
        "max_epochs": 1,
        "seed": 42,
        "logging_steps": 1,
        "eval_steps": -1,
        "num_samples": 0,
        "sample_max_new_tokens": 256,
        "sample_temperature": 0.7,
        "sample_top_p": 0.9,
        "save_path": "./ckpt",
        "save_steps": -1,
        "max_ckpt_num": 3,
        "max_ckpt_mem": 1e8,
        "stall_minutes": 30.0,
        "stall_end_minutes": 90.0,
        "wandb_project": "openkto",
    }
    assert not flat["trust_remote_code"]


def test_names_are_unique_over_the_sections():
    assert len(settings()) == sum(len(section.__dataclass_fields__) for section in SECTIONS.values())


def test_schedules_are_those_of_transformers_that_follow_the_step():
    from transformers.trainer_utils import SchedulerType

    assert {*LR_SCHEDULERS, *METRIC_SCHEDULERS} >= {item.value for item in SchedulerType}


@pytest.mark.parametrize("name", LR_SCHEDULERS)
def test_schedules_with_a_floor_are_those_that_end_at_it(name):
    import torch

    from openkto.trainer.schedule import create_scheduler, learning_rates

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = create_scheduler(optimizer, name, total_steps=200, warmup_ratio=0.1, min_lr_ratio=0.3)
    # One of transformers' schedules stops a step or two above its floor.
    assert (learning_rates(scheduler, 200) == pytest.approx([0.15], rel=0.01)) == (name in FLOORED_SCHEDULES)


def test_the_shortest_row_is_the_one_that_truncation_can_keep():
    from openkto.data.truncation import SMALLEST_MAX_LEN

    assert settings()["max_len"].metadata["option"].at_least == SMALLEST_MAX_LEN


TEXT = st.text(min_size=1).filter(lambda text: text == text.strip() and not text.startswith(("~", "/", ".")))
NAME = st.text("abc-_é/", min_size=1).filter(lambda text: not text.startswith("/"))


def values_of(item) -> st.SearchStrategy:
    known: Option = item.metadata["option"]
    low = known.at_least if known.at_least is not None else known.above
    floats = st.floats(
        low,
        min(x for x in (1e6, known.below, known.at_most) if x is not None),
        exclude_min=known.above is not None,
        exclude_max=True,
        allow_subnormal=False,
    )
    by_kind = {
        "int": st.integers(-1 if low is None else int(low), 10**6 if known.below is None else int(known.below) - 1),
        "int | str": st.just("auto") | st.integers(int(low or 0), int(known.below or 10**6) - 1),
        "float": floats,
        "float | str": floats,
        "bool": st.booleans(),
        "bool | str": st.booleans() | (st.just(known.choices[-1]) if known.choices else NAME),
        "str": st.just("0:01:02:03")
        if known.is_duration
        else st.sampled_from(known.choices)
        if known.choices
        else NAME
        if known.is_path
        else TEXT,
        "list[str]": st.lists(NAME, min_size=1, max_size=3, unique_by=lambda path: path.rstrip("/").split("/")[-1]),
        "list[float]": st.just([0.25, 0.75]),
        "tuple[float, float]": st.tuples(floats, floats),
    }
    of_a_form = {
        "chat_template_kwargs": st.just('{"a": 1}'),
        "template_date": st.dates().map(str),
        "label_map": st.sampled_from([[], ["good=true", "no way=none"]]),
    }
    strategy = of_a_form[item.name] if item.name in of_a_form else by_kind[kind_of(item)]
    return st.none() | strategy if "None" in str(item.type) else strategy


FIXED = {
    "ref_sync_steps": 0,
    "tensor_parallel_size": 1,
    "sequence_parallel_size": 1,
    "use_ms": False,
    "use_liger_kernel": False,
    "deepcompile": False,
    "zero_quantized_gradients": False,
    "offload_nvme_path": None,
    "load_in_4bit": False,
    "use_wandb": False,
    "ds_config": None,
    "input_template": None,
    # What run.yaml leaves out.
    "local_rank": -1,
    "load_checkpoint": False,
    "overwrite": False,
    "stop_after_steps": None,
    "max_time": None,
    "push_to_hub": None,
    "hub_public": False,
    # What may not be installed.
    "report_to": [],
}


def without_contradictions(flat):
    """Return drawn settings without those pairs that nearly all draws would be refused for."""
    if flat["label_threshold"] is not None:
        flat["label_map"] = []
    if flat["gradient_checkpointing"] is not True:
        flat["gradient_checkpointing_use_reentrant"] = False
    if flat["gradient_checkpointing"] == "selective":
        flat["torch_compile"] = False
    if flat["zero_stage"] == 0:
        flat |= {"adam_offload": False, "grad_accum_dtype": None}
    if flat["eval_fraction"]:
        flat |= {"eval_dataset": [], "eval_split": "test"}
    if not flat["lora_rank"]:
        flat["lora_alpha"] = LoraConfig().lora_alpha
    if not flat["keep_best"]:
        flat |= {"early_stop_patience": None, "load_best_at_end": False}
    return flat


# Other work on the machine is no failure, nor that some drawn settings contradict each other.
@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(flat=st.fixed_dictionaries({name: values_of(item) for name, item in settings().items()}))
def test_run_yaml_starts_the_same_run(tmp_path_factory, flat):
    flat = {**flat, **FIXED, "train_batch_size": max(2, flat["train_batch_size"])}
    if flat["dataset_probs"]:
        flat["dataset"] = ["one", "two words"]
    if isinstance(flat["max_tokens_per_micro_batch"], int):
        flat["max_tokens_per_micro_batch"] = max(flat["max_tokens_per_micro_batch"], flat["max_len"])
    if flat["zero_stage"] != 3:
        flat |= {"zpg": 1, "zero_quantized_weights": False, "param_offload": False}
    if flat["loss_type"] != "kto_humanline":
        flat |= {"humanline_low": -1.0, "humanline_high": 1.5}
    config = from_flat(without_contradictions(flat))
    try:
        check(config, lambda name: name, "train")
    except ConfigError:
        assume(False)
    path = tmp_path_factory.mktemp("run") / "run.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert parse(["--config", str(path)], "train")[0] == config


def test_run_yaml_leaves_out_the_process_and_what_one_start_was_told():
    of_one_start = {
        "load_checkpoint": "a/global_step2",
        "overwrite": True,
        "stop_after_steps": 7,
        "max_time": "0:01:00:00",
        "push_to_hub": "my-name/support",
        "hub_public": True,
    }
    run = RunConfig(ModelConfig("m"))
    assert to_yaml(with_resolved(run, local_rank=3, **of_one_start)) == to_yaml(run)


def test_resolved_values_replace_flat_names():
    config = with_resolved(RunConfig(ModelConfig("m")), learning_rate=1e-6, param_dtype="fp32")
    assert (config.optim.learning_rate, config.model.param_dtype, config.loss.beta) == (1e-6, "fp32", 0.1)
    with pytest.raises(AssertionError, match="no such setting"):
        with_resolved(config, learning_rat=1.0)


def test_eval_sets_are_named_after_their_files(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    data = DataConfig(
        eval_dataset=["held=data/x.jsonl", "data/math.test.jsonl", "org/set", "dir/a=b/rows.json", "home=~/y.jsonl"]
    )
    assert eval_sets(data) == {
        "held": "data/x.jsonl",
        "math": "data/math.test.jsonl",
        "set": "org/set",
        "rows": "dir/a=b/rows.json",
        "home": "/home/me/y.jsonl",
    }


def test_an_evaluation_set_may_be_a_mapping_with_a_name():
    entries = ['{"name": "held", "path": "x.jsonl", "label_key": "good"}', '{"path": "data/math.jsonl"}', "{broken"]
    assert [split_eval_set(entry) for entry in entries] == [
        ("held", '{"path": "x.jsonl", "label_key": "good"}'),
        ("math", '{"path": "data/math.jsonl"}'),
        ("{broken", "{broken"),  # refused where it is read
    ]
    assert path_of_entry(entries[1]) == "data/math.jsonl"


def test_openrlhf_defaults_that_differ_are_said_unless_given():
    lines = openrlhf_differences({"input_key"})
    assert lines == [
        "attn_implementation: auto (OpenRLHF: flash_attention_2)",
        "param_dtype: bf16 on a GPU, fp32 on a CPU (OpenRLHF: bf16)",
        "input_template: text prompts as they are (OpenRLHF: 'User: {}\\nAssistant: ')",
        "apply_chat_template: on if the tokenizer has a template, unless --input_template is given (OpenRLHF: off)",
        "beta: 0.1 (OpenRLHF: 0.01)",
        "learning_rate: 1e-6, with LoRA 1e-5 (OpenRLHF: 1e-5)",
        "grad_accum_dtype: fp32 (bf16 loses 0.7% of the gradient) (OpenRLHF: the model's own)",
        "use_tensorboard: <save_path>/tensorboard (OpenRLHF: off)",
        "ckpt_path: <save_path>/checkpoints (OpenRLHF: ./ckpt/checkpoints_kto)",
        "save_steps: -1: once per epoch (OpenRLHF: -1: never)",
    ]
    assert "wandb_project: openkto (OpenRLHF: openrlhf_train_dpo)" in openrlhf_differences(set(), use_wandb=True)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_ready_runs_parse_without_a_warning(path, tmp_path, monkeypatch):
    (tmp_path / "bitsandbytes.py").touch()  # that it is there is all that is looked for
    monkeypatch.syspath_prepend(tmp_path)
    config, options = parse(["--config", str(path)], "train")
    assert config.model.pretrain
    assert options.warnings == ()


def test_the_flags_page_is_that_of_the_code():
    page = runpy.run_path(str(ROOT / "docs" / "make_flags.py"))["page"]()
    assert (ROOT / "docs" / "flags.md").read_text(encoding="utf-8") == page
