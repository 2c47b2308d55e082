"""What fit and evaluate report, in numbers, on any number of ranks."""

import json

import numpy as np
import pytest
import torch
import transformers

from openkto.errors import ConfigError, TrainingError
from openkto.process.watchdog import Watchdog
from openkto.trainer.services import Services
from tests.helpers.long_pairs import no_position_past, seed_that_pairs
from tests.helpers.records import batches, lines
from tests.helpers.stand_in import plain_trainer
from tests.ranks import run_ranks
from tests.tiny import TokenRowList, make_trainer, quiet_args, tiny_llama, token_rows

LABELS = [True, False, True, True, False]
MIXTRAL = dict(num_local_experts=4, num_experts_per_tok=2)


def other_llama():
    return tiny_llama(seed=9)


def evaluate(micro, zero_stage=0, loss_type="kto"):
    trainer, _ = make_trainer(
        token_rows([True, False]), zero_stage=zero_stage, batch=2, micro=micro, reference=other_llama,
        eval_rows=token_rows([True, False, False, True, False, True, True], seed=4), beta=0.3, loss_type=loss_type,
    )  # fmt: skip
    return trainer.evaluate()["eval"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The numbers of an evaluation on one rank."""
    return run_ranks(evaluate, 1, tmp_path_factory.mktemp("alone"), 7)[0]


def test_evaluation_gives_the_same_numbers_on_any_number_of_ranks(alone, tmp_path):
    assert {"loss", "kl", "rewards/auc", "rewards/accuracy", "rewards/margins", "logps/chosen"} <= alone.keys()
    for world_size, micro, stage in ((2, 1, 0), (3, 2, 0), (2, 2, 3)):
        for values in run_ranks(evaluate, world_size, tmp_path, micro, stage):
            assert values == pytest.approx(alone, rel=1e-5, abs=1e-5)


def test_evaluation_pairs_inside_its_own_set_and_clamps_once(alone):
    values = alone
    rows, policy, reference = (
        token_rows([True, False, False, True, False, True, True], seed=4),
        tiny_llama(),
        other_llama(),
    )

    def log_ratio(prompt, completion):
        ids = torch.tensor([prompt["prompt_ids"] + completion["completion_ids"]])
        sums = []
        for model in (policy.double(), reference.double()):
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            tokens = logits.gather(-1, ids[0, 1:, None])[len(prompt["prompt_ids"]) - 1 :]
            sums.append(float(tokens.sum()))
        return sums[0] - sums[1]

    k = [log_ratio(rows[i], rows[i - 1]) for i in range(7)]
    r = [log_ratio(rows[i], rows[i]) for i in range(7)]
    assert values["kl_unclamped"] == pytest.approx(sum(k) / 7, rel=1e-4)
    assert values["kl"] == pytest.approx(max(0.0, sum(k) / 7), rel=1e-4)
    chosen = [0.3 * r[i] for i in range(7) if rows[i]["label"]]
    assert values["rewards/chosen"] == pytest.approx(sum(chosen) / 4, rel=1e-4)


def test_an_evaluation_keeps_no_graph_and_writes_no_gradient():
    trainer = plain_trainer(
        token_rows([True, False]), batch=2, micro=1, eval_rows=token_rows([True, False] * 2, seed=4)
    )
    graphs = []
    trainer.model.register_forward_hook(lambda model, inputs, output: graphs.append(output.log_prob_B.requires_grad))
    trainer.evaluate()
    assert graphs == [False] * 4  # four prompts, each with its own and a mismatched completion
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def train(folder, zero_stage=0, steps=4, log_entropy=False, **more):
    trainer, _ = make_trainer(token_rows(LABELS), zero_stage=zero_stage, batch=2, micro=1, steps=steps, **more)
    trainer.fit(quiet_args(folder, steps, log_entropy=log_entropy))


def run_train(world_size, folder, **more):
    run_ranks(call_train, world_size, folder.parent, folder, more)


def call_train(folder, more):
    train(folder, **more)


def fit(folder, steps=4, *, consumed_samples=0, args=None, **more):
    """Train here, on the stand-in."""
    trainer = plain_trainer(token_rows(LABELS), batch=2, micro=1, steps=steps, **more)
    trainer.fit(quiet_args(folder, steps, **(args or {})), consumed_samples=consumed_samples)


def test_rewards_are_exactly_zero_before_the_first_update(tmp_path):
    for stage in (0, 3):
        run_train(2, tmp_path / f"{stage}", zero_stage=stage, steps=1, share_prompts="off")
        (first,) = lines(tmp_path / f"{stage}", "train")
        assert first["rewards/chosen"] == first.get("rewards/rejected", 0.0) == first["kl"] == 0.0
        assert first["loss"] == 0.5


def test_a_line_over_several_steps_pools_their_rows(tmp_path):
    fit(tmp_path / "each")
    fit(tmp_path / "pooled", args={"logging_steps": 2})
    each, pooled = lines(tmp_path / "each", "train"), lines(tmp_path / "pooled", "train")
    assert [line["step"] for line in pooled] == [2, 4]
    rows = [2, 3, 2, 3]  # batches of an epoch of five rows: two and three
    assert [line["consumed_samples"] for line in each] == [2, 5, 7, 10]
    for name in ("loss", "kl", "rewards/accuracy"):
        for i, line in enumerate(pooled):
            a, b = each[2 * i][name], each[2 * i + 1][name]
            assert line[name] == pytest.approx((rows[0] * a + rows[1] * b) / 5, rel=1e-5, abs=1e-6), name
    assert pooled[-1]["num_tokens"] == each[-1]["num_tokens"]
    assert pooled[-1]["learning_rate"] == each[-1]["learning_rate"]


def test_the_schedule_spans_the_run_and_a_stop_leaves_it_alone(tmp_path):
    more = dict(steps=8, schedule="linear", warmup_ratio=0.25, lr=1e-3)
    fit(tmp_path / "whole", **more)
    fit(tmp_path / "stopped", args={"stop_after_steps": 3}, **more)
    whole = [line["learning_rate"] for line in lines(tmp_path / "whole", "train")]
    assert whole[:2] == [0.0005, 0.001]
    assert whole[-1] == 0.0
    assert [line["learning_rate"] for line in lines(tmp_path / "stopped", "train")] == whole[:3]
    (summary,) = lines(tmp_path / "stopped", "summary")
    assert summary["step"] == 3


def test_training_resumes_after_consumed_samples(tmp_path):
    fit(tmp_path / "whole", args={"log_batches": True})
    fit(tmp_path / "rest", consumed_samples=5, args={"log_batches": True})
    whole, rest = batches(tmp_path / "whole"), batches(tmp_path / "rest")
    assert rest == whole[2:]
    assert [line["step"] for line in lines(tmp_path / "rest", "train")] == [3, 4]
    assert [line["epoch"] for line in lines(tmp_path / "rest", "train")] == [1.4, 2.0]


def test_evaluations_come_at_the_start_once_an_epoch_and_at_the_end(tmp_path):
    fit(tmp_path / "a", steps=5, eval_rows=token_rows([True, False, True]), args={"eval_at_start": True})
    assert [line["step"] for line in lines(tmp_path / "a", "eval")] == [0, 2, 4, 5]
    fit(tmp_path / "b", steps=5, eval_rows=token_rows([True, False, True]), args={"eval_steps": 0})
    assert lines(tmp_path / "b", "eval") == []
    fit(tmp_path / "c", steps=3)
    assert lines(tmp_path / "c", "eval") == []


def test_entropy_is_a_mean_over_completion_tokens(tmp_path):
    run_train(2, tmp_path / "a", steps=1, log_entropy=True)
    run_train(1, tmp_path / "b", steps=1, log_entropy=True)
    (one,), (two,) = lines(tmp_path / "a", "train"), lines(tmp_path / "b", "train")
    assert one["entropy"] == pytest.approx(two["entropy"], rel=1e-5)
    assert 0 < one["entropy"] < 4.12  # log of the vocabulary of 61 words


def tiny_mixtral():

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **MIXTRAL,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_the_balancing_loss_weighs_micro_batches_by_their_tokens_and_ignores_dummies(zero_stage, tmp_path):
    more = dict(steps=2, model=tiny_mixtral, aux_loss_coef=0.01, zero_stage=zero_stage)
    run_train(3, tmp_path / "three", **more)  # more ranks than rows: dummies run too
    run_train(1, tmp_path / "one", **more)
    three, one = lines(tmp_path / "three", "train"), lines(tmp_path / "one", "train")
    for a, b in zip(three, one, strict=True):
        assert a["aux_loss"] == pytest.approx(b["aux_loss"], rel=1e-4)  # micro-batches of one row in both
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        assert 1.5 < b["aux_loss"] < 3.5  # top-2 of 4 experts in balance gives 2


def test_a_loss_without_z_ref_runs_no_mismatched_forward(tmp_path):
    fit(tmp_path / "a", steps=2, loss_type="apo_zero_unpaired")
    for line in lines(tmp_path / "a", "train"):
        assert not {"kl", "kl_unclamped"} & line.keys()
    values = run_ranks(evaluate, 2, tmp_path, 2, 0, "apo_zero_unpaired")[0]
    assert "kl" not in values


def test_arguments_that_contradict_the_strategy_are_refused():
    messages = []
    for more in ({"max_norm": 0.5}, {"aux_loss_coef": 0.1}):
        with pytest.raises(ConfigError) as error:
            plain_trainer(token_rows(LABELS), **more)
        messages.append(str(error.value))
    first, second = messages
    assert first == "max_norm: must be the strategy's 1.0; got 0.5. Give both the same."
    assert second == "aux_loss_coef: needs a mixture-of-experts model; got a dense one. Leave it 0."


def test_num_tokens_counts_matched_tokens_after_the_cut(tmp_path):
    rows = token_rows(LABELS)
    rows.max_len = int(rows.prompt_lengths.max()) + 3
    plain_trainer(rows, batch=5, micro=2, steps=1).fit(quiet_args(tmp_path / "a", 1, log_batches=True))
    prompts, completions = rows.prompt_lengths, rows.completion_lengths
    expected = int(rows.cut_lengths(prompts, completions).sum())
    (batch,) = batches(tmp_path / "a")
    assert lines(tmp_path / "a", "train")[-1]["num_tokens"] == expected
    # Else the test would not tell matched from mismatched tokens.
    assert expected != int(rows.cut_lengths(prompts[batch["rows"]], completions[batch["kl_rows"]]).sum())


def test_the_watchdog_is_told_of_each_batch_that_is_made_and_of_each_step(tmp_path):
    watchdog = Watchdog(0, 0)
    phases, tell = [], watchdog.phase

    def phase(name, **more):
        phases.append(name)
        tell(name, **more)

    watchdog.phase = phase
    trainer = plain_trainer(token_rows([True, False] * 3), batch=4, steps=3, services=Services(watchdog=watchdog))
    trainer.fit(quiet_args(tmp_path, 3, eval_steps=0))
    # An epoch has two steps; after its end the next one's first batch is waited for.
    assert [name for name in phases if "step" in name] == [
        *("making the batch of step 1", "step 1", "making the batch of step 2", "step 2"),
        *("making the batch of step 3", "making the batch of step 3", "step 3"),
    ]


def test_what_was_trained_before_a_failed_step_is_logged(tmp_path):
    with pytest.raises(TrainingError, match="must be finite"):
        fit(tmp_path / "a", lr=1e30, args={"logging_steps": 4})
    (line,) = lines(tmp_path / "a", "train")
    assert line["loss"] == 0.5


def test_the_last_line_comes_before_the_last_evaluation(tmp_path):
    fit(tmp_path / "a", steps=3, eval_rows=token_rows([True, False, True]), args={"logging_steps": 2})
    written = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    kinds = [(line["kind"], line["step"]) for line in written]
    assert kinds == [("run", 0), ("train", 2), ("eval", 2), ("train", 3), ("eval", 3), ("summary", 3)]


def test_a_new_run_in_a_used_folder_keeps_the_earlier_records(tmp_path):
    fit(tmp_path / "a", steps=2)
    fit(tmp_path / "a", steps=3)
    assert [line["step"] for line in lines(tmp_path / "a", "train")] == [1, 2, 3]
    earlier = [json.loads(line) for line in (tmp_path / "a/metrics.1.jsonl").read_text().splitlines()]
    assert [line["step"] for line in earlier if line["kind"] == "train"] == [1, 2]


def train_on_long_pairs(folder):
    items = token_rows([True, False, True, False], longest=4).items
    items[1] |= {"prompt_ids": [5] * 8, "completion_ids": [6] * 3, "completion_mask": [True] * 3}
    items[2] |= {"prompt_ids": [7] * 3, "completion_ids": [8] * 8, "completion_mask": [True] * 8}
    rows = TokenRowList(items, np.arange(4))
    # Row 1's prompt with row 2's completion is the only pair of more than 11 tokens.
    seed = seed_that_pairs(1, 2, rows=4)
    trainer, _ = make_trainer(rows, model=lambda: no_position_past(12), batch=4, micro=1, seed=seed)
    with pytest.raises(TrainingError) as error:
        trainer.fit(quiet_args(folder, 1))
    return str(error.value)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_mismatched_pair_that_is_not_finite_is_named_on_every_rank(world_size, tmp_path):
    for said in run_ranks(train_on_long_pairs, world_size, tmp_path, tmp_path):
        assert said == (
            "step 1, mismatched pairs: every log-probability must be finite; got nan, and no update was made. "
            "Look at row 1's prompt with row 2's completion (counted from 0), or lower --learning_rate."
        )


def llama_without_an_embedding():
    model = tiny_llama()
    model.model.embed_tokens.weight.data[60] = torch.nan
    return model


def train_on_a_completion_without_an_embedding(folder):
    rows = token_rows([True, False, True, False], longest=4)
    for item in rows.items:
        item["completion_ids"] = [5 if token == 60 else token for token in item["completion_ids"]]
        item["prompt_ids"] = [5 if token == 60 else token for token in item["prompt_ids"]]
    rows.items[3] |= {"completion_ids": [60, 7], "completion_mask": [True, True]}
    trainer, _ = make_trainer(
        TokenRowList(rows.items, rows.prompt_keys), model=llama_without_an_embedding, batch=4, micro=2
    )
    with pytest.raises(TrainingError) as error:
        trainer.fit(quiet_args(folder, 1))
    return str(error.value)


def test_a_completion_that_is_not_finite_is_named_by_its_own_row(tmp_path):
    (said,) = run_ranks(train_on_a_completion_without_an_embedding, 1, tmp_path, tmp_path)
    assert said == (
        "step 1: every log-probability must be finite; got nan, and no update was made. "
        "Look at row 3 (counted from 0), or lower --learning_rate."
    )


def test_batches_are_planned_for_how_the_model_runs_rows(tmp_path):
    padding = {}
    for packs in (True, False):
        trainer = plain_trainer(token_rows(LABELS), batch=5, micro=5, steps=1)
        trainer.model.module.packs = packs
        trainer.fit(quiet_args(tmp_path / f"{packs}", 1))
        padding[packs] = lines(tmp_path / f"{packs}", "train")[0]["padding_fraction"]
    assert padding[True] == 0.0 < padding[False]
