"""A run that an earlier version began goes on to the numbers that the earlier version would have come to.

earlier_version.tar.gz was made by the version that knew no format number yet: a tiny model with 24 rows on two ranks at
ZeRO 2, stopped after 3 of 6 steps with a log line open, and, under `expected`, what the same version made of it without
a stop on a processor with AVX-512.
"""

import os
import tarfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

from openkto.commands import train
from tests.helpers.records import records, worst
from tests.ranks import run_ranks

# The earlier version ran each prompt with each completion; sharing them has other round-off.
FLAGS = [
    "--pretrain", "model", "--dataset", "rows.jsonl", "--eval_dataset", "eval.jsonl", "--train_batch_size", "4",
    "--max_steps", "6", "--learning_rate", "1e-2", "--max_len", "64", "--zero_stage", "2", "--param_dtype", "fp32",
    "--use_tensorboard", "none", "--log_batches", "--logging_steps", "2", "--eval_steps", "3",
    "--keep_best", "rewards/margins", "--share_prompts", "off", "--load_checkpoint",
    "--save_path", "out", "--data_cache_dir", "cache",
]  # fmt: skip


@pytest.fixture
def begun(tmp_path) -> Path:
    """Return the folder of a run that an earlier version began."""
    with tarfile.open(Path(__file__).parent / "earlier_version.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def go_on(folder: str) -> None:
    os.chdir(folder)
    train.main(FLAGS)


def test_a_run_of_an_earlier_version_resumes_to_the_same_bits(begun):
    run_ranks(go_on, 2, begun, str(begun))
    model, expected = (
        safetensors.torch.load_file(folder / "model.safetensors") for folder in (begun / "out", begun / "expected")
    )
    tolerance = 0.0 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1e-5
    assert worst(model, expected) <= tolerance
    lines, expected_lines = records(begun / "out"), records(begun / "expected")
    assert [line["step"] for line in lines] == [line["step"] for line in expected_lines]
    for line, other in zip(lines, expected_lines, strict=True):
        shared = {name: value for name, value in line.items() if name in other and name != "kind"}
        assert shared == pytest.approx({name: other[name] for name in shared}, abs=tolerance)
    assert (begun / "out/batches.jsonl").read_text() == (begun / "expected/batches.jsonl").read_text()
    assert (begun / "out/checkpoints/best").read_text() == "global_step6"
