"""The commands as a user calls them: the flags of a small run, the exit status, and what was said."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from openkto.commands import run as runs
from openkto.commands import train
from openkto.commands.run import run


def flags(place: Path, *more: str) -> list[str]:
    """Return the flags of a run on the model and rows that the fixture `place` wrote."""
    return [
        "--pretrain", f"{place}/model", "--dataset", f"{place}/rows.jsonl", "--eval_dataset", f"{place}/eval.jsonl",
        "--train_batch_size", "8", "--learning_rate", "1e-3", "--save_path", f"{place}/out", "--max_len", "128",
        "--use_tensorboard", "none", *more,
    ]  # fmt: skip


def status(command: Callable[[list[str]], Any], argv: list[str], capsys: pytest.CaptureFixture) -> tuple[int, str]:
    """Run a command here; return its exit status and what it wrote."""
    code = run(command, argv)
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return code, output.out + output.err


def run_to_status(argv: list[str], command: Callable[[list[str]], Any] = train.main) -> tuple[int, str]:
    """Run a command on a rank; return its exit status and what it wrote to stderr.

    Here no launcher ends the other ranks once the first has said what is wrong: they need not wait for that.
    """
    stderr, sys.stderr = sys.stderr, io.StringIO()
    seconds, runs.SECONDS_FOR_THE_FIRST_RANK = runs.SECONDS_FOR_THE_FIRST_RANK, 0.0
    try:
        code = run(command, argv)
        return code, sys.stderr.getvalue()
    finally:
        sys.stderr, runs.SECONDS_FOR_THE_FIRST_RANK = stderr, seconds


def mean_chosen(model: torch.nn.Module, place: Path) -> float:
    """Return the mean log-probability of the desirable rows of eval.jsonl, by the model's own logits."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "out")
    sums = []
    for row in map(json.loads, (place / "eval.jsonl").read_text().splitlines()):
        prompt, whole = (
            str(tokenizer.apply_chat_template(messages, add_generation_prompt=ask, tokenize=False))
            for messages, ask in ((row["prompt"], True), (row["prompt"] + row["completion"], False))
        )
        ids = torch.tensor([tokenizer(whole.rstrip("\n"), add_special_tokens=False)["input_ids"]])
        start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            tokens = model.eval()(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
        if row["label"]:
            sums.append(float(tokens[start - 1 :].sum()))
    return sum(sums) / len(sums)
