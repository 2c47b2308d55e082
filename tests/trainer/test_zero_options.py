"""ZeRO++ and offload change where things lie and how they travel, not what a step computes nor what is saved."""

import pytest
import torch

from openkto.config import LoraConfig
from openkto.distributed.gather import gather_weights
from openkto.distributed.optimizer import cpu_adam, problem_with_cpu_adam
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.distributed.zero_options import ZeroOptions, missing_for_nvme
from openkto.errors import CheckpointError
from tests.helpers.records import worst
from tests.helpers.runs import MIXED, assert_same, start, train
from tests.ranks import run_ranks
from tests.tiny import make_trainer, quiet_args, tiny_llama, token_rows


def shown(value):
    """Return a test's name of some options: those that are set."""
    if not isinstance(value, ZeroOptions):
        return None
    return " ".join(f"{name}={one}" for name, one in vars(value).items() if one != vars(ZeroOptions())[name])


STEPS = 3  # an epoch, whose last batch is smaller
HPZ = ZeroOptions(zpg=2)
OFFLOADED = ZeroOptions(adam_offload=True, param_offload=True)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return run_ranks(train, 1, folder, MIXED, folder, 0, 4, 4, STEPS)[0]


def train_with(labels, folder, zero_stage, zero):
    return train(labels, folder, zero_stage, 4, 2, STEPS, zero=zero)


@pytest.mark.parametrize(
    ("world_size", "zero_stage", "zero"),
    [
        pytest.param(2, 3, HPZ, marks=pytest.mark.slow),
        (4, 3, HPZ),
        pytest.param(2, 1, ZeroOptions(adam_offload=True), marks=pytest.mark.slow),
        pytest.param(2, 2, ZeroOptions(adam_offload=True), marks=pytest.mark.slow),
        pytest.param(2, 3, ZeroOptions(adam_offload=True), marks=pytest.mark.slow),
        pytest.param(2, 3, ZeroOptions(param_offload=True), marks=pytest.mark.slow),
        (2, 3, ZeroOptions(adam_offload=True, param_offload=True, ref_offload=True, zpg=2)),
        pytest.param(2, 2, ZeroOptions(overlap_comm=True, reduce_bucket_size=100), marks=pytest.mark.slow),
        (2, 3, ZeroOptions(overlap_comm=True, reduce_bucket_size=100, allgather_bucket_size=100)),
    ],
    ids=shown,
)
def test_a_step_computes_the_same(one_rank, tmp_path, world_size, zero_stage, zero):
    others = run_ranks(train_with, world_size, tmp_path, MIXED, tmp_path, zero_stage, zero)[0]
    assert_same(one_rank, others)


def with_a_reference_that_moves(folder, zero_stage, zero):
    return train([True, False, True, False], folder, zero_stage, 4, 2, 4, zero=zero, ref_sync_steps=2)


def test_a_reference_that_moves_is_fetched_as_it_now_is(tmp_path):
    # Its second copy, of hpZ, is made once; were it not made again, the old reference would be computed with.
    one = run_ranks(with_a_reference_that_moves, 1, tmp_path, tmp_path / "one", 0, ZeroOptions())[0]
    others = run_ranks(with_a_reference_that_moves, 4, tmp_path, tmp_path / "four", 3, HPZ)[0]
    assert_same(one, others)
    still = run_ranks(train, 1, tmp_path, [True, False, True, False], tmp_path / "still", 0, 4, 2, 4)[0]
    assert abs(still[0][2]["loss"] - one[0][2]["loss"]) > 1e-4


def sizes_after_a_step(folder):
    trainer, _ = make_trainer(token_rows(MIXED), zero_stage=3, batch=4, micro=2, zero=HPZ)
    trainer.fit(quiet_args(folder, 1))
    parameter = trainer.ref_model.module.model.lm_head.weight
    return parameter.ds_tensor.numel(), parameter.ds_secondary_tensor.numel(), parameter.ds_numel


def test_hpz_keeps_a_second_copy_over_few_ranks(tmp_path):
    primary, secondary, whole = run_ranks(sizes_after_a_step, 4, tmp_path, tmp_path / "out")[0]
    assert (primary, secondary) == (whole // 4, whole // 2)


def passing_reference(folder):
    trainer, strategy = make_trainer(token_rows(MIXED), zero_stage=3, batch=4, micro=2, zero=HPZ)
    with strategy.passing_model(trainer.ref_model.module):
        pass
    parameters = list(trainer.ref_model.module.parameters())
    return sum(p.numel() + p.ds_tensor.numel() + p.ds_secondary_tensor.numel() for p in parameters)


def test_a_passing_model_takes_its_second_copy_with_it(tmp_path):
    assert run_ranks(passing_reference, 2, tmp_path, tmp_path) == [0, 0]


def lora_run(folder, zero_stage, zero):
    more = {"lora": LoraConfig(lora_rank=4), "ref_mode": "adapter", "zero": zero}
    return train(MIXED, folder, zero_stage, 4, 2, STEPS, **more)


@pytest.mark.parametrize("zero", [pytest.param(HPZ, marks=pytest.mark.slow), OFFLOADED], ids=shown)
def test_an_adapter_trains_the_same(tmp_path, zero):
    one = run_ranks(lora_run, 1, tmp_path, tmp_path / "one", 0, ZeroOptions())[0]
    others = run_ranks(lora_run, 2, tmp_path, tmp_path / "two", 3, zero)[0]
    assert_same(one, others)


def trained(tmp_path, folder, *starts):
    """Run several starts, each (ranks, ZeRO stage, options, stop after); return the last one's weights."""
    for world_size, zero_stage, zero, stop in starts:
        more = {"zero": zero}
        weights = run_ranks(
            start, world_size, tmp_path, tmp_path / folder, zero_stage, {"stop_after_steps": stop}, more
        )[0]
    return weights


@pytest.mark.parametrize(
    ("zero_stage", "zero"),
    [
        *(pytest.param(n, ZeroOptions(adam_offload=True), marks=pytest.mark.slow) for n in (1, 2)),
        (3, ZeroOptions(adam_offload=True, param_offload=True, zpg=2)),
    ],
    ids=shown,
)
def test_checkpoints_go_in_and_out_of_offload_to_the_last_bit(tmp_path, zero_stage, zero):
    plain = ZeroOptions()
    whole = trained(tmp_path, "whole", (2, zero_stage, plain, None))
    starts = [(2, zero_stage, *start) for start in ((plain, 2), (zero, 3), (zero, 5), (plain, None))]
    assert worst(whole, trained(tmp_path, "cut", *starts)) == 0.0


def test_an_offloaded_checkpoint_resumes_at_another_stage_on_another_number_of_ranks(tmp_path):
    whole = trained(tmp_path, "whole", (1, 0, ZeroOptions(), None))
    cut = trained(tmp_path, "cut", (2, 3, OFFLOADED, 3), (1, 2, ZeroOptions(adam_offload=True), None))
    assert worst(whole, cut) < 1e-6


def optimizer_run(folder, zero_stage, fused):
    trainer, _ = make_trainer(token_rows(MIXED), zero_stage=zero_stage, batch=4, micro=2, steps=4, l2=0.1)
    for group in trainer.optim.param_groups:
        group |= {"fused": fused, "foreach": False}
    trainer.fit(quiet_args(folder, 4))
    return gather_weights(trainer.model.module.model, torch.float32)


@pytest.mark.parametrize("zero_stage", [*(pytest.param(n, marks=pytest.mark.slow) for n in range(3)), 3])
def test_the_fused_adam_of_gpus_makes_the_same_updates(tmp_path, zero_stage):
    # torch has it on the CPU too; `create_optimizer` asks for it on a GPU alone.
    plain, fused = (
        run_ranks(optimizer_run, 1, tmp_path, tmp_path / str(how), zero_stage, how)[0] for how in (False, True)
    )
    assert worst(plain, fused) < 1e-6


def on_disk(folder, nvme, stage, zero, args):
    trainer, _ = make_trainer(
        token_rows([True, False] * 4), model=wide_llama, zero_stage=stage, batch=4, micro=2, steps=3, zero=zero
    )
    trainer.fit(quiet_args(folder, 3, **args))
    weights = gather_weights(trainer.model.module.model, torch.float32)
    return weights, sum(file.stat().st_size for file in nvme.rglob("*") if file.is_file())


def wide_llama():
    # DeepSpeed leaves what is smaller than 1 MiB on a rank in memory.
    return tiny_llama(hidden_size=1024, intermediate_size=1024, num_hidden_layers=1)


def refused_checkpoint(folder, nvme, zero):
    with pytest.raises(CheckpointError) as caught:
        on_disk(folder, nvme, 3, zero, {"save_steps": 1})
    return str(caught.value)


@pytest.mark.slow
def test_what_lies_on_a_disk_trains_the_same_and_is_never_half_saved(tmp_path):
    problem = missing_for_nvme()  # builds the op, for minutes
    if problem:
        pytest.skip(f"DeepSpeed's async_io: {problem}")
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    plain, _ = run_ranks(on_disk, 2, tmp_path, tmp_path / "plain", nvme, 3, ZeroOptions(), {})[0]
    optimizer = ZeroOptions(adam_offload=True, offload_nvme_path=str(nvme))
    both = ZeroOptions(adam_offload=True, param_offload=True, offload_nvme_path=str(nvme))  # parameters: CPU memory
    for name, zero in (("optimizer", optimizer), ("both", both)):
        weights, size = run_ranks(on_disk, 2, tmp_path, tmp_path / name, nvme, 3, zero, {})[0]
        assert worst(plain, weights) < 1e-6, name
        assert size > 2**20
    for message in run_ranks(refused_checkpoint, 2, tmp_path, tmp_path / "saved", nvme, optimizer):
        assert message.startswith("a checkpoint: must hold the optimizer's states; got some that lie on a disk")


def with_cpu_adam(folder, zero_stage, stop):
    plain = DeepspeedStrategy.create_optimizer

    def create(self, model, *, lr, betas=(0.9, 0.95), weight_decay=0.0):  # as on a machine with a GPU
        groups = plain(self, model, lr=lr, betas=betas, weight_decay=weight_decay).param_groups
        return cpu_adam([{name: g[name] for name in ("params", "weight_decay")} for g in groups], lr=lr, betas=betas)

    DeepspeedStrategy.create_optimizer = create
    return start(folder, zero_stage, {"stop_after_steps": stop}, {"zero": ZeroOptions(adam_offload=True)})


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_deepspeeds_cpu_adam_resumes_to_the_last_bit_and_updates_as_torchs(tmp_path, zero_stage):
    problem = problem_with_cpu_adam()  # builds the op, for a minute or two
    if problem:
        pytest.skip(f"DeepSpeed's cpu_adam: {problem}")
    torchs = trained(tmp_path, "torch", (2, zero_stage, ZeroOptions(adam_offload=True), None))
    whole = run_ranks(with_cpu_adam, 2, tmp_path, tmp_path / "whole", zero_stage, None)[0]
    run_ranks(with_cpu_adam, 2, tmp_path, tmp_path / "cut", zero_stage, 3)
    cut = run_ranks(with_cpu_adam, 2, tmp_path, tmp_path / "cut", zero_stage, None)[0]
    assert worst(whole, cut) == 0.0
    assert worst(whole, torchs) < 1e-6
