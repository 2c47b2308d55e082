"""A step that gives NaN leaves what it takes to make it again."""

import json
import math

import numpy as np
import pytest
import torch

from openkto.data.batch import epoch_order
from openkto.errors import TrainingError
from tests.ranks import run_ranks
from tests.tiny import TokenRowList, make_trainer, quiet_args, token_rows
from tests.trainer.test_kto_trainer import no_position_past, partner

LENGTHS = [(8, 3), (3, 8)]  # of rows 1 and 2, by prompt and completion


def train_on_a_pair_that_is_too_long(folder):
    items = token_rows([True, False, True, False], longest=4).items
    for row, (prompt, completion) in enumerate(LENGTHS, 1):
        items[row] |= {"prompt_ids": [5] * prompt, "completion_ids": [6 + row] * completion}
        items[row]["completion_mask"] = [True] * completion
    seed = next(s for s in range(99) if partner(epoch_order(4, s, 0).tolist(), 1) == 2)
    rows = TokenRowList(items, np.arange(4))
    trainer, _ = make_trainer(rows, model=lambda: no_position_past(12), batch=4, micro=1, seed=seed)
    with pytest.raises(TrainingError):
        trainer.fit(quiet_args(folder, 1, log_batches=True))
    ids = torch.tensor([items[1]["prompt_ids"] + items[1]["completion_ids"]])
    tokens = no_position_past(12).double().eval()(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
    return float(tokens[LENGTHS[0][0] - 1 :].sum())


def test_a_step_that_fails_leaves_its_rows_lengths_and_terms(tmp_path):
    log_prob = run_ranks(train_on_a_pair_that_is_too_long, 2, tmp_path, tmp_path / "a")[0]
    left = json.loads((tmp_path / "a/failed_step1.json").read_text())
    assert (left["step"], left["updates_before"], left["dtype"]) == (1, 0, "torch.float32")
    assert (left["z_ref"], left["mismatched_mean"]) == ("nan", "nan")
    assert sorted(row["row"] for row in left["rows"]) == [0, 1, 2, 3]
    (row,) = (row for row in left["rows"] if row["row"] == 1)
    assert (row["prompt_tokens"], row["completion_tokens"], row["scored_tokens"]) == (8, 3, 3)
    assert (row["is_desirable"], row["weight"], row["log_ratio"]) == (0, 1, 0)
    assert row["log_prob"] == pytest.approx(log_prob, rel=1e-5)
    bad = [pair for pair in left["mismatched_pairs"] if not math.isfinite(float(pair["log_ratio"]))]
    assert bad == [{"prompt_of": 1, "completion_of": 2, "log_ratio": "nan"}]
    (line,) = map(json.loads, (tmp_path / "a/batches.jsonl").read_text().splitlines())
    assert line["step"] == 1
    assert sorted(line["rows"]) == [0, 1, 2, 3]
