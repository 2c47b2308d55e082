"""How large a micro-batch may be: the arithmetic, and that trying leaves no trace in what training computes."""

from types import SimpleNamespace

import pytest
import torch

from openkto.batches.loader import WITHOUT_GRADIENT, Layout
from openkto.commands.build import measure_micro_batches
from openkto.config import ModelConfig, RunConfig, with_resolved
from openkto.distributed.gather import gather_weights
from openkto.models.actor import ActorOutput
from openkto.process.watchdog import Watchdog
from openkto.trainer.largest_micro_batch import CPU_TOKENS, most_rows, pending_state, settle_tokens, try_micro_batch
from tests.helpers.records import lines
from tests.ranks import run_ranks
from tests.tiny import make_trainer, quiet_args, token_rows

LABELS = [True, False, True, True, False, False, True, False]


@pytest.mark.parametrize(
    ("fixed", "a_row", "room", "rows"),
    [
        (100, 10, 200, 10),
        (100, 10, 209, 10),
        (100, 10, 210, 11),
        (100, 10, 99, 1),
        (0, 1, 10**9, 64),
        (100, 0, 200, 64),
    ],
)
def test_memory_rises_in_a_line(fixed, a_row, room, rows):
    assert most_rows(lambda rows: fixed + a_row * rows, room, most=64) == rows


def test_no_second_trial_where_two_rows_may_not_fit():
    tried = []

    def measure(rows):
        tried.append(rows)
        return 100 + 60 * rows

    assert most_rows(measure, room=170, most=64) == 1
    assert 2 not in tried


def test_a_cpu_takes_a_fixed_number_of_tokens_or_the_longest_row():
    class Cpu:
        device = torch.device("cpu")

    assert settle_tokens(None, Cpu(), 100, lambda: None) == CPU_TOKENS
    assert settle_tokens(None, Cpu(), 3 * CPU_TOKENS, lambda: None) == 3 * CPU_TOKENS


def test_what_the_optimizer_will_take_is_known_until_it_has_it():
    weight = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.AdamW([weight])
    cpu = torch.device("cpu")
    assert pending_state(optimizer, torch.device("cuda")) == 0
    assert pending_state(optimizer, cpu) == 5 * 4 * 3
    weight.grad = torch.ones(5)
    optimizer.step()
    assert pending_state(optimizer, cpu) == 0


def train(folder, zero_stage, precision, tries):
    rows = token_rows(LABELS, 3)
    trainer, strategy = make_trainer(rows, zero_stage=zero_stage, param_dtype=precision, batch=4, micro=2)
    for number in range(tries):
        try_micro_batch(trainer.model, strategy, number + 1, 9, with_gradient=True)
    trainer.fit(quiet_args(folder, 3))
    weights = gather_weights(trainer.model.module.model, torch.float32)
    return lines(folder), weights if strategy.rank == 0 else None


@pytest.mark.parametrize(
    ("zero_stage", "precision"),
    [
        pytest.param(0, "fp32", marks=pytest.mark.slow),
        pytest.param(1, "fp32", marks=pytest.mark.slow),
        pytest.param(2, "fp32", marks=pytest.mark.slow),
        pytest.param(3, "fp32", marks=pytest.mark.slow),
        pytest.param(1, "bf16", marks=pytest.mark.slow),
        pytest.param(2, "bf16", marks=pytest.mark.slow),
        (3, "bf16"),
    ],
)
def test_a_trial_changes_no_bit_of_what_training_computes(zero_stage, precision, tmp_path):
    (lines, weights), _ = run_ranks(train, 2, tmp_path, tmp_path / "a", zero_stage, precision, 0)
    (others, other_weights), _ = run_ranks(train, 2, tmp_path, tmp_path / "b", zero_stage, precision, 2)
    for line, other in zip(lines, others, strict=True):
        assert all(line[name] == other[name] for name in ("loss", "kl", "grad_norm", "rewards/chosen"))
    assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())


class Recorder:
    """Stands for engine and strategy: writes down what is run."""

    device = torch.device("cpu")
    module = SimpleNamespace(share_prompts="off")

    def __init__(self):
        self.runs, self.mode = [], None

    def eval(self):
        self.mode = "eval"

    def train(self):
        self.mode = "train"

    def __call__(self, input_ids, *_):
        self.runs.append((self.mode, tuple(input_ids.shape)))
        zeros = torch.zeros(len(input_ids), dtype=torch.float64)
        return ActorOutput(zeros, zeros, zeros.sum(), zeros[:0])

    def backward(self, engine, loss, *, is_last):
        self.runs.append(("backward", is_last))


def test_a_trial_runs_the_largest_forwards_of_a_step(monkeypatch):
    monkeypatch.setitem(WITHOUT_GRADIENT, "cpu", 4)  # as on a GPU
    recorder = Recorder()
    try_micro_batch(recorder, recorder, 3, 9, with_gradient=True)
    assert recorder.runs == [("eval", (12, 9)), ("train", (3, 9)), ("backward", False)]


def test_ranks_that_share_tokens_each_take_their_part_of_what_fits():
    config = with_resolved(RunConfig(ModelConfig("m")), max_tokens_per_micro_batch="auto")
    loaders = [SimpleNamespace(longest=100, layout=Layout(shared_by=shared_by)) for shared_by in (1, 3)]
    measure_micro_batches(config, Recorder(), None, loaders, Watchdog(0, 0))
    assert [loader.layout.measured_tokens for loader in loaders] == [CPU_TOKENS, 2731]
