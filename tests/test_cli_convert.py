"""A checkpoint becomes the model that a run would have saved at its step."""

import pytest
import torch

from openkto.commands import convert_checkpoint, train
from openkto.commands.run import run
from tests.helpers.commands import flags
from tests.helpers.records import same, weights
from tests.ranks import run_ranks


def convert(place, *more):
    argv = ["--pretrain", f"{place}/model", "--save_path", f"{place}/converted", *more]
    return run(convert_checkpoint.main, argv)


@pytest.mark.parametrize(
    ("world_size", "more"),
    [
        pytest.param(2, ["--zero_stage", "0"], marks=pytest.mark.slow),
        (2, ["--zero_stage", "2", "--param_dtype", "bf16"]),
        (3, ["--zero_stage", "3"]),
        pytest.param(
            2, ["--zero_stage", "1", "--param_dtype", "bf16", "--export_dtype", "fp32"], marks=pytest.mark.slow
        ),
    ],
)
def test_a_converted_checkpoint_is_the_model_that_the_run_saved(place, world_size, more):
    run_ranks(train.main, world_size, place, flags(place, "--max_steps", "2", *more))
    dtype = more[more.index("--export_dtype") :] if "--export_dtype" in more else []
    assert convert(place, "--load_checkpoint", f"{place}/out/checkpoints/global_step2", *dtype) == 0
    assert same(weights(place / "out"), weights(place / "converted"))
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (place / "converted" / name).read_text() == (place / "out" / name).read_text()
    assert (place / "converted/README.md").read_text() == (place / "out/README.md").read_text()


def test_a_converted_adapter_is_the_adapter_that_the_run_saved(place):
    more = ["--max_steps", "2", "--lora_rank", "4", "--zero_stage", "3"]
    run_ranks(train.main, 2, place, flags(place, *more))
    assert convert(place, "--load_checkpoint", f"{place}/out/checkpoints/global_step2") == 0
    name = "adapter_model.safetensors"
    assert same(weights(place / "out", name), weights(place / "converted", name))
    assert 'library_name: "peft"' in (place / "converted/README.md").read_text()
    # Without the run's records nothing is known to write of it.
    (place / "out/metrics.jsonl").unlink()
    assert convert(place, "--overwrite", "--load_checkpoint", f"{place}/out/checkpoints/latest") == 0


def test_what_cannot_be_converted_is_one_sentence(place, capsys):
    run_ranks(train.main, 1, place, flags(place, "--max_steps", "1"))
    folder = place / "out/checkpoints/global_step1"
    assert convert(place, "--load_checkpoint") == 2
    assert capsys.readouterr().err.strip() == (
        "error: --load_checkpoint: must be a checkpoint's folder; got true. Name it, as .../global_step12."
    )
    assert convert(place, "--load_checkpoint", f"{place}/nothing") == 1
    assert "must hold a DeepSpeed checkpoint with its optimizer; got a folder without" in capsys.readouterr().err
    file = next(folder.glob("*optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-1])
    assert convert(place, "--load_checkpoint", str(folder)) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: {folder}: must be a complete checkpoint; got one where {file.name} has ")
    assert not (place / "converted").exists()


def test_another_programs_checkpoint_is_converted_too(place):
    """One that trains the model itself, at stage 0 and 2, and knows nothing of our manifest."""
    for stage in (0, 2):
        trained = run_ranks(train_elsewhere, 1, place, str(place / "model"), str(place / f"other{stage}"), stage)[0]
        assert convert(place, "--overwrite", "--load_checkpoint", f"{place}/other{stage}/global_step1") == 0
        converted = weights(place / "converted")
        assert all(torch.equal(tensor, trained[name]) for name, tensor in converted.items())


def train_elsewhere(model, folder, stage):
    import deepspeed
    import deepspeed.ops
    import transformers

    deepspeed.ops.__compatible_ops__ = {}
    policy = transformers.AutoModelForCausalLM.from_pretrained(model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=policy, optimizer=torch.optim.AdamW(policy.parameters(), lr=0.1), config=config
    )
    ids = torch.tensor([[5, 6, 7]])
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint(folder, tag="global_step1")
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}
