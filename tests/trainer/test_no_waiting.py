"""Between a step's first forward and the place where its rows are read, nothing makes the host wait for the device.

A CPU never waits, but the operations that would make a GPU's host wait are the same ones: a tensor's value as a number,
a result whose size depends on values, and a tensor made from the host's values, which is copied to the device.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import openkto.trainer.kto_trainer as loop
from openkto.models import log_probs
from tests.ranks import run_ranks
from tests.tiny import make_trainer, quiet_args, token_rows

aten = torch.ops.aten
SIZED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.masked_scatter_backward.default,
    aten._unique2.default,
}


class Waits(TorchDispatchMode):
    """Collects what would wait."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func in (aten.index.Tensor, aten.index_put_.default) and any(
            t is not None and t.dtype == torch.bool for t in args[1]
        )
        if func in SIZED_BY_VALUES or func in (aten._local_scalar_dense.default, aten.lift_fresh.default) or by_mask:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def waits_of_a_step(tmp_path, packing, more):
    trainer, _ = make_trainer(token_rows([True, False, True, False]), batch=4, micro=2, steps=1, **more)
    if packing == "off":
        trainer.model.module.packs = False
    waits, began, read = Waits(), loop.forward_before_backward, loop.read_rows

    def begin(*args):
        waits.__enter__()
        return began(*args)

    def end(*args):
        waits.__exit__(None, None, None)
        return read(*args)

    loop.forward_before_backward, loop.read_rows = begin, end
    trainer.fit(quiet_args(tmp_path, 1, log_entropy=True))
    return waits.found


@pytest.mark.parametrize("packing", ["auto", "off"])
@pytest.mark.parametrize(
    "more", [{}, {"loss_type": "kto_humanline"}, {"sft_loss_coef": 0.5}, {"loss_type": "bco"}], ids=str
)
def test_a_step_waits_for_nothing_before_its_rows_are_read(packing, more, tmp_path):
    (found,) = run_ranks(waits_of_a_step, 1, tmp_path, tmp_path, packing, more)
    assert found == []


def test_the_test_sees_what_waits():
    with Waits() as waits:
        mask = torch.tensor([True, False])
        mask.sum().item()
        mask[mask]
        mask.nonzero()
        mask.new_tensor(3.0)
    assert len(waits.found) == 5  # two tensors of the host's values
    assert log_probs.row_sums(torch.ones(1), mask[None]).tolist() == [1.0]
