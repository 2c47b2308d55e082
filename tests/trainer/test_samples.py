"""Answers during training: they change nothing, are transformers' own, and are written down once."""

import json

import pytest
import torch

from openkto.config import LoraConfig
from openkto.data.prompts import Prompt
from openkto.distributed.zero_options import ZeroOptions
from openkto.models import Actor
from openkto.models.generation import Sampling, answer
from openkto.trainer.rng import rng_state
from openkto.trainer.samples import Samples
from openkto.trainer.services import Services
from tests.helpers.runs import MIXED, start, train
from tests.ranks import run_ranks
from tests.tiny import make_trainer, tiny_llama, token_rows

PROMPTS = [Prompt("eval", [1, 5, 6, 7], (8, 9, 2), True), Prompt("file", [1, 9]), Prompt("file", [1, 17, 44, 3, 21])]
NEW_TOKENS = 8


class Numbers:
    """A tokenizer whose text is the ids."""

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


def samples() -> Samples:
    return Samples(PROMPTS, Sampling(NEW_TOKENS, 0.7, 0.9, (2,), 0), Numbers(), 3)


def answers_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def both_ways(folder, zero_stage, more):
    """Train with samples and without; return both weights, and the generators' states at the end."""
    ends = []
    for name, asked in (("with", samples()), ("without", None)):
        found = train(
            MIXED,
            folder / name,
            zero_stage,
            services=Services(samples=asked),
            eval_rows=token_rows([True, False] * 3, 5),
            **more,
        )
        ends.append((found[1] if found else None, rng_state(torch.device("cpu"))))
    return ends


WAYS = {
    "zero_0": (0, {}),
    "zero_2_lora_with_dropout": (2, {"lora": LoraConfig(lora_rank=2, lora_dropout=0.3), "ref_mode": "adapter"}),
    "zero_3": (3, {}),
    "zero_3_layer_at_a_time": (3, {"zero": ZeroOptions(param_offload=True, adam_offload=True)}),
}


QUICK = ("zero_2_lora_with_dropout", "zero_3_layer_at_a_time")


@pytest.mark.parametrize(
    ("zero_stage", "more"),
    [pytest.param(*way, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, way in WAYS.items()],
)
def test_a_run_with_samples_has_the_very_weights_of_one_without(tmp_path, zero_stage, more):
    ranks = run_ranks(both_ways, 2, tmp_path, tmp_path, zero_stage, more)
    (weights, _), (plain_weights, _) = ranks[0]
    assert weights.keys() == plain_weights.keys()
    assert all(torch.equal(weights[name], plain_weights[name]) for name in weights)
    for (_, state), (_, plain_state) in ranks:
        assert all((state[name] == plain_state[name]).all() for name in state)
    lines = answers_of(tmp_path / "with")
    assert [(line["step"], line["sample"]) for line in lines] == [(s, i) for s in (0, 3, 5) for i in range(3)]
    assert not (tmp_path / "without" / "samples.jsonl").exists()


def whole_in_between():
    """Return how many parameters are whole at ZeRO 3: before answers are made, after a forward then, and afterwards."""
    trainer, strategy = make_trainer(token_rows(MIXED), zero_stage=3)
    parameters = list(trainer.model.module.parameters())

    def whole():
        return sum(parameter.shape == parameter.ds_shape for parameter in parameters)

    counts = [whole()]
    with strategy.weights_for_generation(trainer.model):
        trainer.model.module.language_model(input_ids=torch.tensor([[1, 2]]))
        counts.append(whole())
    return [*counts, whole()], len(parameters)


def test_at_zero_3_the_weights_are_gathered_once_and_given_back(tmp_path):
    for counts, of in run_ranks(whole_in_between, 2, tmp_path):
        assert counts == [0, of, 0]


# ---- what is answered -----------------------------------------------------------------------------------------------


def answers_on(way, packs=True):
    """Return the answers of a policy that no step has changed."""
    trainer, strategy = make_trainer(token_rows(MIXED), **way)
    trainer.model.module.packs = packs
    return samples().take(trainer.model, strategy, trainer.watchdog, lambda: None)


SPLITS = {
    "one_rank": (1, {}),
    "zero_3": (2, {"zero_stage": 3}),
    "tensor_parallel": (2, {"tensor_parallel_size": 2}),
    "sequence_parallel": (2, {"sequence_parallel_size": 2, "zero_stage": 3}),
}


@pytest.mark.parametrize(("ranks", "way"), SPLITS.values(), ids=SPLITS.keys())
def test_greedy_answers_are_those_of_transformers_on_any_ranks_packed_and_padded(tmp_path, ranks, way):
    model = tiny_llama().eval()
    padded = run_ranks(answers_on, 1, tmp_path, {}, False) if ranks == 1 else []
    for lines in [*padded, *run_ranks(answers_on, ranks, tmp_path, way)]:
        for prompt, line in zip(PROMPTS, lines, strict=True):
            ids = torch.tensor([prompt.ids])
            made = model.generate(input_ids=ids, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=2)
            expected = made[0, len(prompt.ids) :].tolist()
            assert line["greedy_finished"] == (expected[-1] == 2)
            assert line["greedy"] == " ".join(map(str, expected[:-1] if expected[-1] == 2 else expected))
    known = {"sample": 0, "source": "eval", "prompt": "1 5 6 7", "completion": "8 9", "label": True}
    assert {name: lines[0][name] for name in known} == known
    assert "completion" not in lines[1]


def test_a_sampled_answer_depends_on_its_own_prompt_and_seed_alone():
    actor, sampling = Actor(tiny_llama()), Sampling(NEW_TOKENS, 1.0, 1.0, (), 0)

    def sampled(prompts, seeds):
        made = answer(actor, prompts, seeds, sampling, torch.device("cpu"), between=lambda: None)
        return [one.sampled for one in made]

    state = torch.get_rng_state()
    _, second = sampled([[1, 5, 6], [1, 9]], [7, 8])
    assert sampled([[1, 9]], [8]) == [second]
    assert sampled([[1, 9]], [9]) != [second]
    assert torch.equal(torch.get_rng_state(), state)


def test_samples_are_drawn_from_the_tempered_nucleus():
    model, count = tiny_llama().eval(), 3000
    sampling = Sampling(1, 2.0, 0.8, (), 0)
    made = answer(Actor(model), [[1, 5]] * count, range(count), sampling, torch.device("cpu"), between=lambda: None)
    with torch.no_grad():
        p = (model(input_ids=torch.tensor([[1, 5]])).logits[0, -1].double() / 2.0).softmax(-1)
    order = p.argsort(descending=True)
    kept = order[: int((p[order].cumsum(0) < 0.8).sum()) + 1]
    expected = torch.zeros_like(p)
    expected[kept] = p[kept] / p[kept].sum()
    drawn = torch.bincount(torch.tensor([one.sampled[0] for one in made]), minlength=len(p)) / count
    assert len(kept) > 1
    assert float(drawn[expected == 0].sum()) == 0.0
    # Four standard errors of a share of one half.
    torch.testing.assert_close(drawn.double(), expected, rtol=0, atol=4 * 0.5 / count**0.5)


def test_a_model_keeps_its_mode_attention_and_generation_config():
    model = tiny_llama()
    model.generation_config.repetition_penalty = 9.0
    actor = Actor(model, gradient_checkpointing=True)
    actor.train()

    def state():
        return model.config._attn_implementation, model.generation_config, model.training, actor.training

    before = state()
    made = answer(actor, [[1, 5, 6]], [0], Sampling(4, 1.0, 1.0, (), 0), torch.device("cpu"), between=lambda: None)
    assert state() == before
    assert model.is_gradient_checkpointing
    plain = tiny_llama().eval()
    plain.generation_config.eos_token_id = None
    expected = plain.generate(input_ids=torch.tensor([[1, 5, 6]]), max_new_tokens=4, do_sample=False)
    assert made[0].greedy == expected[0, 3:].tolist()  # without the penalty


# ---- interrupted ----------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_each_steps_answers_once(tmp_path):
    args = {"eval_steps": 2, "eval_at_start": True}
    more = {"services": Services(samples=samples()), "eval_rows": token_rows([True, False, True], seed=9)}
    for folder, stops in (("whole", (None,)), ("cut", (2, 5, None))):
        for stop in stops:
            run_ranks(start, 1, tmp_path, tmp_path / folder, 0, args | {"stop_after_steps": stop}, more)
    whole = answers_of(tmp_path / "whole")
    assert [line["step"] for line in whole] == [0] * 3 + [2] * 3 + [4] * 3 + [6] * 3
    assert answers_of(tmp_path / "cut") == whole


def test_answers_are_asked_for_without_evaluation_sets_before_training_and_at_the_end(tmp_path):
    args = {"eval_steps": 0, "load_checkpoint": False}
    run_ranks(start, 1, tmp_path, tmp_path / "run", 0, args, {"services": Services(samples=samples())})
    assert sorted({line["step"] for line in answers_of(tmp_path / "run")}) == [0, 6]
    metrics = [json.loads(line)["kind"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert "eval" not in metrics
