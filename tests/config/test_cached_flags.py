"""The rules between the settings of a cached reference, and the sentence for each that is broken."""

import pytest

from openkto.config import may_be_cached, trains_adapter
from openkto.config.flags import parse
from openkto.errors import ConfigError

RUN = ["--pretrain", "m", "--dataset", "rows.jsonl"]


def warnings(*argv):
    return [text.partition(",")[0] for text in parse([*RUN, *argv], "train")[1].warnings]


def test_which_runs_may_take_a_cache():
    def may(*argv):
        config, _ = parse([*RUN, *argv], "train")
        return may_be_cached(config, has_adapter=trains_adapter(config))

    assert may()
    assert may("--ref_mode", "cached", "--lora_rank", "8")
    assert may("--ref_pretrain", "other", "--lora_rank", "8")
    assert not may("--lora_rank", "8")
    assert not may("--ref_mode", "model")


def test_settings_without_effect_are_said():
    assert warnings("--ref_mode", "cached", "--ref_offload") == ["--ref_offload: has no effect"]
    assert warnings("--ref_mode", "model", "--ref_cache_dir", "x") == ["--ref_cache_dir: has no effect"]
    assert warnings("--lora_rank", "8", "--ref_cache_dir", "x") == ["--ref_cache_dir: has no effect"]
    assert warnings("--ref_mode", "cached", "--ref_cache_dir", "x") == []


@pytest.mark.parametrize("mode", ["model", "adapter"])
def test_precomputing_is_for_a_cache(mode):
    adapter = ["--lora_rank", "8"] if mode == "adapter" else []
    with pytest.raises(ConfigError) as caught:
        parse([*RUN, "--ref_mode", mode, *adapter], "precompute_reference")
    assert str(caught.value) == (
        f"--ref_mode: must be cached or auto, the modes that use a cache; got {mode}. Take cached, here and to train."
    )


def test_a_loss_that_needs_every_tokens_value_is_refused():
    argv = [*RUN, "--loss_type", "kto_humanline"]
    for more, command in ((["--ref_mode", "cached"], "train"), ([], "precompute_reference")):
        with pytest.raises(ConfigError) as caught:
            parse([*argv, *more], command)
        assert str(caught.value) == (
            "--loss_type: cached keeps the reference's log-probabilities of whole completions, not of each token; got "
            "kto_humanline. Take --ref_mode model."
        )
    assert not may_be_cached(parse(argv, "train")[0], has_adapter=False)
