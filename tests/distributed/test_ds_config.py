"""The DeepSpeed configuration, and a user's file laid over it."""

import json

import pytest

from openkto.distributed.ds_config import deepspeed_config, merge_user_config
from openkto.errors import ConfigError


def computed(**changes):
    settings = {"zero_stage": 2, "precision": "bf16", "micro_batch_size": 4, "max_norm": 1.0} | changes
    return deepspeed_config(**settings)


def merged(tmp_path, user, **changes):
    path = tmp_path / "ds.json"
    path.write_text(user if isinstance(user, str) else json.dumps(user))
    return merge_user_config(computed(**changes), str(path))


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
        ({"fp16": {"enabled": True}}, "fp16.enabled: is decided by --param_dtype; got true"),
        ({"zero_optimisation": {}}, "zero_optimisation: no such key in DeepSpeed's configuration"),
        ("[1]", "must hold one JSON object; got list"),
        ("{", "must be a JSON file"),
    ],
)
def test_what_contradicts_the_run_is_refused_by_key(tmp_path, user, sentence):
    with pytest.raises(ConfigError, match=sentence):
        merged(tmp_path, user)
