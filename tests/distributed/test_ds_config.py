"""The DeepSpeed configuration, and a user's file laid over it."""

import json
import os

import pytest
import torch
import torch.distributed as dist

from openkto.distributed.ds_config import deepspeed_config, frozen_config, merge_user_config
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.distributed.zero_options import ZeroOptions, add_sizes, check_device, check_ranks
from openkto.errors import ConfigError


def computed(**changes):
    settings = {"zero_stage": 2, "precision": "bf16", "micro_batch_size": 4, "max_norm": 1.0} | changes
    return deepspeed_config(**settings)


def merged(tmp_path, user, train_batch_size=None, **changes):
    path = tmp_path / "ds.json"
    path.write_text(user if isinstance(user, str) else json.dumps(user))
    return merge_user_config(computed(**changes), str(path), train_batch_size)


def refusal(tmp_path, monkeypatch, user, **changes):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(user if isinstance(user, str) else json.dumps(user))
    with pytest.raises(ConfigError) as caught:
        merge_user_config(computed(**changes), "ds.json")
    return str(caught.value)


def test_bf16_accumulates_and_reduces_in_float32():
    config = computed()
    assert config["bf16"] == {"enabled": True}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["communication_data_type"] == "fp32"


def test_bf16_at_stage_0_keeps_float32_parameters_under_autocast():
    config = computed(zero_stage=0)
    assert "bf16" not in config
    assert config["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}


def test_no_clipping_is_written_out():
    assert computed(max_norm=0.0)["gradient_clipping"] == 0.0


def test_a_users_keys_win_where_the_run_does_not_decide(tmp_path):
    config = merged(tmp_path, {"zero_optimization": {"reduce_bucket_size": 7}, "wall_clock_breakdown": True})
    assert config["zero_optimization"]["reduce_bucket_size"] == 7
    assert config["zero_optimization"]["stage"] == 2
    assert config["wall_clock_breakdown"] is True


def test_a_byte_order_mark_is_no_fault(tmp_path):
    (tmp_path / "ds.json").write_bytes(b"\xef\xbb\xbf{}")
    assert merge_user_config(computed(), str(tmp_path / "ds.json")) == computed()


def test_auto_and_repeated_values_are_the_computed_ones(tmp_path):
    user = {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
    assert merged(tmp_path, user) == computed()


@pytest.mark.parametrize(
    ("user", "sentence"),
    [
        ({"zero_optimization": {"stage": 3}}, r"zero_optimization.stage: is decided by --zero_stage \(2\); got 3"),
        ({"gradient_clipping": 0.5}, r"gradient_clipping: is decided by --max_norm \(1.0\); got 0.5"),
        ({"train_batch_size": 7}, "train_batch_size: is decided by --train_batch_size; got 7"),
        ({"gradient_accumulation_steps": 8}, "gradient_accumulation_steps: is decided by .*; got 8"),
        ({"optimizer": {"type": "Adam"}}, "optimizer: is decided by --learning_rate"),
        ({"fp16": {"enabled": True}}, r"fp16.enabled: is decided by --param_dtype \(false\); got true"),
        ({"optimizer": None}, "optimizer: is decided by --learning_rate, .*; got null"),
        ({"zero_optimisation": {}}, "zero_optimisation: must be a key of DeepSpeed's that has a use here; got {}"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine: is decided by OpenKTO"),
        ({"sparse_gradients": True}, r"sparse_gradients: is decided by OpenKTO \(false\); got true"),
        ({"elasticity": {"enabled": True}}, "elasticity: is decided by OpenKTO"),
        ({"zero_allow_untested_optimizer": False}, "zero_allow_untested_optimizer: is decided by OpenKTO"),
        ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer: is decided by OpenKTO"),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal: is decided by OpenKTO"),
        (
            {"zero_optimization": {"zero_quantized_gradients": True}},
            "zero_quantized_gradients: is decided by --zero_quantized",
        ),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            "zero_quantized_weights: is decided by --zero_quantized_w",
        ),
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, r"zero_hpz_partition_size: .* \(1\); got 2"),
        ({"zero_optimization": {"overlap_comm": True}}, "overlap_comm: is decided by --overlap_comm"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "device: is decided by --adam_offload"),
        ({"zero_optimization": {"cpu_offload": True}}, "cpu_offload: is decided by --adam_offload"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "device: is decided by --param_offload"),
        ({"fp16": {"min_loss_scale": 2}}, r"fp16.min_loss_scale: is decided by OpenKTO \(1.0\); got 2"),
        ({"bf16": {"check_grad_overflow": False}}, "bf16.check_grad_overflow: is decided by OpenKTO"),
        ({"data_types": {"param_dtype": "fp32"}}, "data_types.param_dtype: is decided by --param_dtype"),
    ],
)
def test_what_contradicts_the_run_is_refused_by_key(tmp_path, user, sentence):
    with pytest.raises(ConfigError, match=sentence):
        merged(tmp_path, user)


@pytest.mark.parametrize(
    ("user", "sentence"),
    [
        ("{", "ds.json:1: must be JSON; got an error there: Expecting property name enclosed in double quotes. "
         "Correct it."),
        ("[1]", "ds.json: must be a JSON object; got list. Write {...} around its keys."),
        ("[" * 100_000, "ds.json: must be JSON; got text that JSON cannot hold. Correct it."),
        ('{"bf16": {"enabled": true, "enabled": true}}', 'ds.json: a key may be given only once; got "enabled" twice. '
         "Keep one of the two."),
        ({"zero_optimization": 3}, "ds.json: zero_optimization: must be an object; got 3. Correct it, or take it out "
         "of the file."),
        ({"zero_optimization": None}, "ds.json: zero_optimization: must be an object; got null. Correct it, or take it "
         "out of the file."),
        ({"zero_optimization": []}, "ds.json: zero_optimization: must be an object; got []. Correct it, or take it out "
         "of the file."),
        ({"bf16": True}, "ds.json: bf16: must be an object; got true. Correct it, or take it out of the file."),
        ({"fp16": "x"}, 'ds.json: fp16: must be an object; got "x". Correct it, or take it out of the file.'),
        ({"data_types": "x"}, 'ds.json: data_types: must be an object; got "x". Correct it, or take it out of the '
         "file."),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "ds.json: data_types.grad_acum_dtype: must be a key of "
         'DeepSpeed\'s that has a use here; got "fp32". Remove it.'),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, "ds.json: zero_optimization.offload_optimizer: must be "
         'an object; got "cpu". Correct it, or take it out of the file.'),
        ({"steps_per_print": "x"}, 'ds.json: steps_per_print: must be a whole number; got "x". Correct it.'),
        ({"dump_state": 1}, "ds.json: dump_state: must be true or false; got 1. Correct it."),
        ({"wandb": 3}, "ds.json: wandb: must be an object; got 3. Correct it."),
        ({"zero_optimization": {"stgae": 2}}, "ds.json: zero_optimization.stgae: must be a key of DeepSpeed's; got 2. "
         "Remove it."),
        ({"zero_optimization": {"reduce_bucket_size": "abc"}}, "ds.json: zero_optimization.reduce_bucket_size: must be "
         "what DeepSpeed takes (Input should be a valid integer, unable to parse string as an integer); got \"abc\". "
         "Correct it."),
        ({"zero_optimization": {"reduce_bucket_size": -5}}, "ds.json: zero_optimization.reduce_bucket_size: must be "
         "what DeepSpeed takes (Input should be greater than 0); got -5. Correct it."),
        ({"zero_optimization": {"reduce_bucket_size": {}}}, "ds.json: zero_optimization.reduce_bucket_size: must be "
         "what DeepSpeed takes (Input should be a valid integer); got {}. Correct it."),
        ({"wandb": {"enabled": 3}}, "ds.json: wandb.enabled: must be what DeepSpeed takes (Input should be a valid "
         "boolean, unable to interpret input); got 3. Correct it."),
        ({"checkpoint": {"tag_validation": "x"}}, "ds.json: checkpoint: must be what DeepSpeed takes (Checkpoint "
         "config contains invalid tag_validation value of X, expecting one of ['WARN', 'IGNORE', 'FAIL']); got "
         '{"tag_validation": "x"}. Correct it.'),
    ],
)  # fmt: skip
def test_what_deepspeed_would_refuse_or_pass_over_is_one_sentence_with_file_and_key(
    tmp_path, monkeypatch, user, sentence
):
    assert refusal(tmp_path, monkeypatch, user) == f"--ds_config {sentence}"


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--ds_config: must be a JSON file; got .* \(No such file or directory\)"):
        merge_user_config(computed(), str(tmp_path / "no.json"))
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ConfigError, match=r"--ds_config: must be a plain file; got '.*/pipe\.json', a named pipe"):
        merge_user_config(computed(), str(tmp_path / "pipe.json"))


@pytest.mark.parametrize(
    ("user", "changes"),
    [
        ({"bf16": {"enabled": False}, "fp16": {"enabled": False}}, {"precision": "fp32"}),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0, "min_loss_scale": 1}}, {}),
        ({"gradient_accumulation_steps": 1, "zero_allow_untested_optimizer": True, "sparse_gradients": False}, {}),
        ({"zero_optimization": {"overlap_comm": False, "offload_optimizer": {"device": "none"}}}, {}),
        ({"zero_optimization": {"offload_param": {"device": "none"}, "zero_hpz_partition_size": 1}}, {}),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, {"options": ZeroOptions(adam_offload=True)}),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}, "wandb": {"project": "auto"}}, {}),
        ({"amp": {"enabled": False}, "optimizer": "auto", "zero_optimization": "auto"}, {}),
        ({"train_batch_size": 8}, {"train_batch_size": 8}),
    ],
)
def test_what_agrees_is_accepted_and_changes_nothing(tmp_path, user, changes):
    expected = computed(**{name: value for name, value in changes.items() if name != "train_batch_size"})
    assert merged(tmp_path, user, **changes) == expected


def test_another_global_batch_than_the_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"train_batch_size: is decided by --train_batch_size \(8\); got 16"):
        merged(tmp_path, {"train_batch_size": 16}, train_batch_size=8)


def test_a_file_may_say_more_of_an_offload_but_not_whether_there_is_one(tmp_path):
    user = {"zero_optimization": {"offload_param": {"buffer_count": 7}}}
    config = merged(tmp_path, user, zero_stage=3, options=ZeroOptions(param_offload=True))
    assert config["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": False, "buffer_count": 7}
    with pytest.raises(ConfigError, match=r"offload_param.device: is decided by --param_offload .*; got \"cpu\""):
        merged(tmp_path, {"zero_optimization": {"offload_param": {"device": "cpu"}}}, zero_stage=3)


def test_a_bucket_is_the_flags_where_it_is_given_else_the_files(tmp_path):
    user = {"zero_optimization": {"reduce_bucket_size": 7}}
    with pytest.raises(ConfigError, match=r"reduce_bucket_size: is decided by --reduce_bucket_size \(9\); got 7"):
        merged(tmp_path, user, options=ZeroOptions(reduce_bucket_size=9))
    assert add_sizes(merged(tmp_path, user)["zero_optimization"], [100], [])["reduce_bucket_size"] == 7


def test_each_flag_is_its_key():
    options = ZeroOptions(zpg=4, zero_quantized_weights=True, zero_quantized_gradients=True, allgather_bucket_size=6)
    zero = computed(zero_stage=3, options=options)["zero_optimization"]
    assert zero == {
        "stage": 3,
        "overlap_comm": False,
        "zero_hpz_partition_size": 4,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "stage3_prefetch_bucket_size": 6,
    }
    frozen = frozen_config(zero_stage=3, precision="bf16", micro_batch_size=1, offload=False, options=options)
    assert frozen["zero_optimization"] == {"stage": 3, "zero_hpz_partition_size": 4, "zero_quantized_weights": True}
    assert computed(options=ZeroOptions(allgather_bucket_size=6))["zero_optimization"]["allgather_bucket_size"] == 6
    assert computed(zero_stage=3, options=ZeroOptions(deepcompile=True))["compile"] == {"deepcompile": True}


def test_sizes_follow_from_the_model():
    zero = {"stage": 3}
    assert add_sizes(zero, [10, 20], []) == {
        "stage": 3, "reduce_bucket_size": 30, "stage3_param_persistence_threshold": 100_000,
    }  # fmt: skip
    assert add_sizes({"stage": 2}, [80_000_000], []) == {"stage": 2, "reduce_bucket_size": 50_000_000}
    # An adapter's matrices stay whole on every rank, its base's do not.
    lora = add_sizes(zero, [16 * 14336, 16 * 4096], [4096 * 14336])
    assert lora["stage3_param_persistence_threshold"] == 16 * 14336


def test_ranks_that_cannot_be_grouped_are_refused():
    check_ranks(ZeroOptions(zpg=2), 4)
    with pytest.raises(ConfigError) as caught:
        check_ranks(ZeroOptions(zpg=8), 4)
    assert str(caught.value) == (
        "--zpg: must divide the number of ranks, 4; got 8. Take the number of GPUs of a node, or leave it out."
    )


@pytest.mark.parametrize("name", ["zero_quantized_weights", "zero_quantized_gradients"])
def test_a_cpu_does_not_quantize(name):
    with pytest.raises(ConfigError) as caught:
        check_device(ZeroOptions(**{name: True}), torch.device("cpu"))
    assert str(caught.value) == (f"--{name}: needs a CUDA GPU, whose kernels quantize; got cpu. Leave it out.")


def test_making_the_strategy_is_enough_to_find_a_contradiction(tmp_path):
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 3}')
    with pytest.raises(ConfigError, match="gradient_clipping: is decided by --max_norm"):
        DeepspeedStrategy(ds_config=str(tmp_path / "ds.json"))
    assert not dist.is_initialized()
