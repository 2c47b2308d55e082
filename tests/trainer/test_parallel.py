"""Ranks that share a model's weights, or the tokens of its rows, change nothing that a step computes."""

from itertools import accumulate

import pytest
import torch
import transformers
from deepspeed.module_inject.tp_plan_converter import TPPlanConverter

from openkto.config import LoraConfig
from openkto.distributed.gather import gather_weights
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.distributed.tensor_parallel import split_of
from openkto.distributed.zero_options import ZeroOptions
from openkto.errors import ConfigError
from openkto.models import Actor
from tests.helpers import definition
from tests.helpers.records import batches, records, worst
from tests.helpers.records import lines as read_lines
from tests.helpers.runs import STEPS as STEPS_OF_STARTS
from tests.helpers.runs import prepared, start
from tests.ranks import run_ranks
from tests.tiny import Oracle, make_trainer, quiet_args, tiny_llama, token_rows

LABELS = [True, False, True, True, False, False, True, False, True, False, False]
LR, BETA, WEIGHTS, STEPS = 3e-4, 0.3, (1.3, 0.7), 3
LORA = LoraConfig(lora_rank=4, lora_alpha=8)
SPLIT, SHARED, ALONE = ({"tensor_parallel_size": t, "sequence_parallel_size": s} for t, s in ((2, 1), (1, 2), (1, 1)))
WAYS = pytest.mark.parametrize("way", [SPLIT, SHARED], ids=["weights", "tokens"])
MIXTRAL = {"kind": "Mixtral", "changes": {"num_local_experts": 4, "num_experts_per_tok": 2}, "aux_loss_coef": 0.1}


def tiny(kind, **changes):
    """Return a random float32 model of two layers, hidden 32, with 4 heads and 2 key-value heads."""
    torch.manual_seed(0)
    settings = dict(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config(**(settings | changes))).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # else the gradients of norms that are 1, or 0, would be all alike
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def train(folder, more):
    """Train; return (metrics lines, what trained) on rank 0, None elsewhere."""
    settings = {"lr": LR, "beta": BETA, "micro": 2} | more
    settings |= {"desirable_weight": WEIGHTS[0], "undesirable_weight": WEIGHTS[1]}
    kind, changes = settings.pop("kind", None), settings.pop("changes", {})
    if kind is not None:
        settings["model"] = lambda: tiny(kind, **changes)
    trainer, strategy = make_trainer(token_rows(LABELS, 3), batch=4, steps=STEPS, **settings)
    trainer.fit(quiet_args(folder, STEPS, log_batches=True, log_entropy=True))
    weights = gather_weights(trainer.model.module.model, torch.float32, trainable_only="lora" in settings)
    return (read_lines(folder), weights) if strategy.rank == 0 else None


def assert_is_definition(folder, got, model, reference=None, max_norm=1.0):
    """Compare a run with every step in float64 on one rank, and its count of tokens with its rows'."""
    rows = token_rows(LABELS, 3)
    oracle = Oracle(model, beta=BETA, weights=WEIGHTS, lr=LR, max_norm=max_norm, reference=reference)
    definition.assert_is_definition(folder, got, rows, oracle, kl=3e-5, weights=2e-5)
    lengths = rows.prompt_lengths + rows.completion_lengths
    tokens = [int(lengths[batch["rows"]].sum()) for batch in batches(folder)]
    assert [line["num_tokens"] for line in got[0]] == list(accumulate(tokens))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@WAYS
@pytest.mark.parametrize("zero_stage", [slow(0), slow(1), slow(2), 3])
def test_two_ranks_train_as_the_definition_says(way, zero_stage, tmp_path):
    # The gradient is clipped to a hundredth, and Adam would hide a wrong scale of it.
    got = run_ranks(train, 2, tmp_path, tmp_path / "a", way | {"zero_stage": zero_stage, "max_norm": 0.01})[0]
    assert_is_definition(tmp_path / "a", got, tiny_llama(), max_norm=0.01)
    assert min(line["grad_norm"] for line in got[0]) > 0.01


@pytest.mark.parametrize(("way", "zero_stage"), [slow(SPLIT, 0), (SPLIT, 3), (SHARED, 1), slow(SHARED, 3)])
def test_so_do_two_times_two(way, zero_stage, tmp_path):
    more = way | {"zero_stage": zero_stage, "max_norm": 0.01, "micro": 1}
    got = run_ranks(train, 4, tmp_path, tmp_path / "a", more)[0]
    assert_is_definition(tmp_path / "a", got, tiny_llama(), max_norm=0.01)


@pytest.mark.parametrize(
    ("way", "kind", "changes", "zero_stage"),
    [
        slow(SPLIT, "Qwen2", {}, 1),  # biases of what is cut by columns
        (SPLIT, "Qwen3", {"tie_word_embeddings": True}, 2),  # norms of single heads, whose gradients are of a part
        slow(SPLIT, "Gemma3", {"sliding_window": 4}, 3),  # tied, scaled embeddings, norms behind the sums
        (SPLIT, "Llama", {"attention_bias": True, "mlp_bias": True}, 3),  # biases of what is cut by rows
        slow(SHARED, "Qwen3", {"tie_word_embeddings": True}, 2),
        (SHARED, "Gemma3", {"sliding_window": 4}, 2),  # windows over the border of two slices
        slow(SHARED, "Gemma3", {"sliding_window": 4}, 3),
        # One head for two ranks. With 48 inner units one gradient is so near 0 that Adam makes its round-off a step.
        (SHARED, "Llama", {"num_key_value_heads": 1, "intermediate_size": 64}, 1),
    ],
)
def test_architectures(way, kind, changes, zero_stage, tmp_path):
    more = way | {"kind": kind, "changes": changes, "zero_stage": zero_stage}
    got = run_ranks(train, 2, tmp_path, tmp_path / "a", more)[0]
    assert_is_definition(tmp_path / "a", got, tiny(kind, **changes))


@pytest.mark.parametrize(
    ("way", "zero_stage", "ref_mode"),
    [
        *(slow(way, n, mode) for way in (SPLIT, SHARED) for n, mode in ((0, "model"), (1, "adapter"))),
        slow(SPLIT, 2, "adapter"),
        (SPLIT, 3, "model"),
        (SHARED, 2, "adapter"),
        slow(SHARED, 3, "model"),
    ],
)
def test_an_adapter_trains_as_the_definition_says(way, zero_stage, ref_mode, tmp_path):
    more = way | {"zero_stage": zero_stage, "lora": LORA, "ref_mode": ref_mode}
    got = run_ranks(train, 2, tmp_path, tmp_path / "a", more)[0]
    assert_is_definition(tmp_path / "a", got, Actor(tiny_llama(), lora=LORA).model, reference=tiny_llama())


# ---- what goes with it ----------------------------------------------------------------------------------------------


def compare(tmp_path, way, more, rel=1e-5):
    """Compare two ranks that share with one that is alone."""
    alone = run_ranks(train, 1, tmp_path, tmp_path / "one", ALONE | more)[0]
    shared = run_ranks(train, 2, tmp_path, tmp_path / "two", way | more)[0]
    for line, other in zip(alone[0], shared[0], strict=True):
        assert line.keys() == other.keys()
        for name in ("loss", "kl", "grad_norm", "entropy", "rewards/chosen", "num_tokens", "aux_loss"):
            if name in line:
                assert other[name] == pytest.approx(line[name], rel=rel, abs=rel), name
        # A token at the most for each micro-batch, where there are two ranks to share it.
        assert other["padding_fraction"] == pytest.approx(line["padding_fraction"], abs=0.0 if way is SPLIT else 0.1)


REENTRANT = {"gradient_checkpointing": True, "use_reentrant": True}
OFFLOADED = {"zero": ZeroOptions(adam_offload=True, param_offload=True, ref_offload=True), "zero_stage": 3}
FOLLOWING = {"ref_sync_steps": 1, "ref_sync_alpha": 0.5}


@pytest.mark.parametrize(
    ("way", "more"),
    [
        slow(SPLIT, REENTRANT | {"zero_stage": 3}),
        slow(SPLIT, REENTRANT | {"lora": LORA, "ref_mode": "adapter", "zero_stage": 1}),
        slow(SPLIT, OFFLOADED),
        slow(SPLIT, FOLLOWING | {"zero_stage": 0}),
        slow(SPLIT, FOLLOWING | {"zero_stage": 3}),
        slow(SPLIT, {"loss_type": "kto_humanline", "zero_stage": 1, "gradient_checkpointing": True}),
        (SPLIT, {"lora": LoraConfig(lora_rank=4, lora_modules_to_save=["lm_head"]), "ref_mode": "adapter"}),
        slow(SHARED, REENTRANT | {"zero_stage": 3}),
        (SHARED, REENTRANT | {"lora": LORA, "ref_mode": "adapter", "zero_stage": 1}),
        slow(SHARED, OFFLOADED),
        slow(SHARED, FOLLOWING | {"zero_stage": 3}),
        (SHARED, {"gradient_checkpointing": "selective", "zero_stage": 2}),
        slow(SHARED, {"gradient_checkpointing": "selective", "zero_stage": 3}),
        slow(SHARED, {"loss_type": "kto_humanline", "zero_stage": 1, "gradient_checkpointing": True}),
        slow(SHARED, {"loss_type": "bco", "sft_loss_coef": 0.5}),
        slow(SHARED, {"lora": LoraConfig(lora_rank=4, use_dora=True), "ref_mode": "adapter", "zero_stage": 2}),
        # The balancing loss is of whole micro-batches, and would be another of their halves.
        (SHARED, MIXTRAL | {"zero_stage": 2, "micro": 1}),
        slow(SHARED, MIXTRAL | {"zero_stage": 3, "micro": 1}),
    ],
)
def test_settings_that_go_with_it(way, more, tmp_path):
    compare(tmp_path, way, more)


@pytest.mark.parametrize(("way", "zero_stage"), [(SPLIT, 3), slow(SHARED, 0)])
def test_half_precision(way, zero_stage, tmp_path):
    compare(tmp_path, way, {"zero_stage": zero_stage, "param_dtype": "bf16"}, rel=0.05)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def run(tmp_path, folder, *starts):
    """Run several starts, each (ranks, ZeRO stage, stop after, way); return the last one's weights."""
    for world_size, zero_stage, stop, way in starts:
        weights = run_ranks(
            start, world_size, tmp_path, tmp_path / folder, zero_stage, {"stop_after_steps": stop}, way
        )[0]
    return weights


@pytest.mark.parametrize(("way", "zero_stage"), [slow(SPLIT, 0), (SPLIT, 2), slow(SPLIT, 3), (SHARED, 2)])
def test_a_resumed_run_is_bit_equal(way, zero_stage, tmp_path):
    whole = run(tmp_path, "whole", (2, zero_stage, None, way))
    cut = run(tmp_path, "cut", (2, zero_stage, 2, way), (2, zero_stage, None, way))
    assert worst(whole, cut) == 0.0
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


# Places to stop and to go on at, each (ranks, ZeRO stage, way).
PLACES = [(2, 0, SPLIT), (1, 3, ALONE), (2, 3, SPLIT), (2, 2, SHARED)]


def test_a_run_resumes_with_other_tensor_and_sequence_parallel_sizes(tmp_path):
    """One run that is at each place for a step, and at the first again at its end."""
    whole = run(tmp_path, "whole", (1, 2, None, ALONE))
    stops = [(ranks, stage, i, way) for i, (ranks, stage, way) in enumerate(PLACES, 1)]
    assert worst(whole, run(tmp_path, "cut", *stops, (2, 0, None, SPLIT))) < 1e-6
    assert [line["loss"] for line in read_lines(tmp_path / "cut")] == pytest.approx(
        [line["loss"] for line in read_lines(tmp_path / "whole")], abs=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), list(zip(PLACES, [*PLACES[1:], *PLACES[:1]], strict=True)))
def test_a_run_moves_once_between_two_of_those_sizes(tmp_path, before, after):
    whole = run(tmp_path, "whole", (1, 2, None, ALONE))
    (a, b, c), (d, e, f) = before, after
    assert worst(whole, run(tmp_path, "cut", (a, b, 3, c), (d, e, None, f))) < 1e-6


def with_dropout(folder, stop, way):
    """Return the whole weights, and this rank's own of what every rank has whole."""
    dropout = {"lora": LoraConfig(lora_rank=4, lora_dropout=0.3), "ref_mode": "adapter"}
    trainer, _ = prepared(1, **way, **dropout)
    trainer.fit(quiet_args(folder, STEPS_OF_STARTS, stop_after_steps=stop, load_checkpoint=True))
    parameters = trainer.model.module.named_parameters()
    own = {name: p.detach().clone() for name, p in parameters if p.requires_grad and split_of(p) is None}
    return gather_weights(trainer.model.module, torch.float32), own


@pytest.mark.parametrize("way", [SPLIT, slow(SHARED)], ids=["weights", "tokens"])
def test_dropout_in_an_adapter_resumes_and_leaves_all_ranks_the_same_weights(way, tmp_path):
    whole, first = run_ranks(with_dropout, 2, tmp_path, tmp_path / "whole", None, way)[0]
    run_ranks(with_dropout, 2, tmp_path, tmp_path / "cut", 3, way)
    (cut, own), (_, other) = run_ranks(with_dropout, 2, tmp_path, tmp_path / "cut", None, way)
    assert worst(whole, cut) == 0.0
    assert worst(own, other) == worst(own, first) == 0.0
    assert len(own) == (14 if way is SPLIT else 28)


# ---- what does not --------------------------------------------------------------------------------------------------


def test_deepspeed_has_no_layers_for_experts_that_are_cut():
    # Why a model of experts cannot be cut: 0.19.8 knows these styles of transformers' plan for it not.
    with pytest.raises(ValueError, match=r"unsupported partition style.*'moe_tp_experts', 'packed_colwise'"):
        TPPlanConverter.convert(transformers.MixtralConfig().base_model_tp_plan)


@pytest.mark.parametrize(
    ("kind", "changes", "size", "said"),
    [
        ("Mixtral", {}, 2, "of plain columns and rows; got mixtral, with moe_tp_experts, packed_colwise. Leave it out"),
        ("Llama", {}, 4, "must divide the model's 2 key-value heads; got 4"),
        (
            "Llama",
            {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6},
            4,
            "the model's 6 attention heads; got 4",
        ),
        ("Llama", {"intermediate_size": 47}, 2, "got 2, and 47 in model.model.layers.0.mlp.gate_proj"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(kind, changes, size, said):
    actor = Actor(tiny(kind, **changes))
    with pytest.raises(ConfigError) as error:
        actor.split_plan(size)
    assert str(error.value).startswith("--tensor_parallel_size: ")
    assert said in str(error.value)


def test_an_adapter_that_cannot_be_cut_is_refused():
    actor = Actor(tiny_llama(), lora=LoraConfig(lora_rank=4, use_dora=True))
    with pytest.raises(ConfigError, match="cuts linear layers, plain or with plain LoRA; got Linear in model"):
        actor.split_plan(2)


def share_what_cannot_be(packing, heads):
    strategy = DeepspeedStrategy(param_dtype="fp32", sequence_parallel_size=3)
    strategy.setup_distributed()
    actor = Actor(tiny_llama(num_attention_heads=heads), packing=packing)
    with pytest.raises(ConfigError) as error:
        strategy.share_model(actor)
    return str(error.value)


def test_tokens_that_cannot_be_shared_are_refused(tmp_path):
    assert run_ranks(share_what_cannot_be, 3, tmp_path, "off", 4)[0] == (
        "--sequence_parallel_size: cuts packed rows; got LlamaForCausalLM, whose rows are padded. Leave it out."
    )
    assert run_ranks(share_what_cannot_be, 3, tmp_path, "auto", 4)[0] == (
        "--sequence_parallel_size: must divide the model's 4 attention heads; got 3. Take a number that does."
    )
