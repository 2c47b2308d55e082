"""DeepspeedStrategy: the only class that calls DeepSpeed's engine and collectives.

Shapes:  L = rows on this rank, N = rows on all ranks.
"""

import contextlib
import gc
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Literal, TypeVar

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import enable_full_determinism, set_seed

from openkto.distributed.agreement import check_all_agree
from openkto.distributed.ds_config import Precision, deepspeed_config, flat_config, frozen_config, merge_user_config
from openkto.distributed.engine_state import load_engine, save_engine
from openkto.distributed.gather import gather_lines, whole_shape
from openkto.distributed.heap import Heap
from openkto.distributed.launch import check_computes, start_process
from openkto.distributed.mesh import Mesh, make_mesh
from openkto.distributed.optimizer import cpu_adam, has_cpu_adam, parameter_groups
from openkto.distributed.sequence_parallel import SharedTokens
from openkto.distributed.sharded import born_sharded, direct_forward, empty, fits_whole, whole_weights
from openkto.distributed.tensor_parallel import split_model
from openkto.distributed.update import StepResult, loss_scale, step, step_with_loss_scale
from openkto.distributed.zero_options import ZeroOptions, add_sizes, check_device, check_ranks
from openkto.errors import ConfigError

Schedule = TypeVar("Schedule", bound=LRScheduler)


class DeepspeedStrategy:
    """Holds a run's DeepSpeed settings; prepares models for them and runs backward, step and reductions.

    Args:
        zero_stage: 0 to 3.
        param_dtype: fp32, bf16 or fp16. bf16 at stage 0 means float32 parameters under autocast.
        train_batch_size, micro_train_batch_size: compared with `ds_config` and told to DeepSpeed, used for nothing.
        max_norm: gradients are clipped to this norm; 0 is off.
        grad_accum_dtype: of accumulation and reduction under bf16.
        zero: how DeepSpeed shards, moves, packs and compiles.
        tensor_parallel_size: N ranks share a model's weights, and run the same rows together.
        sequence_parallel_size: N ranks share the tokens of the same rows.
        ds_config: a DeepSpeed JSON file laid over the computed configuration.
        seed: of Python, numpy and torch.
        full_determinism: only deterministic kernels; slower.
    """

    def __init__(
        self,
        *,
        zero_stage: int = 2,
        param_dtype: Precision | None = None,
        train_batch_size: int | None = None,
        micro_train_batch_size: int = 1,
        max_norm: float = 1.0,
        grad_accum_dtype: Literal["fp32", "bf16"] = "fp32",
        zero: ZeroOptions | None = None,
        tensor_parallel_size: int = 1,
        sequence_parallel_size: int = 1,
        ds_config: str | None = None,
        seed: int = 42,
        full_determinism: bool = False,
    ) -> None:
        self.zero_stage = zero_stage
        self.precision: Precision = param_dtype or ("bf16" if torch.cuda.is_available() else "fp32")
        self.max_norm = max_norm
        self.micro_batch_size = micro_train_batch_size
        self.zero = zero or ZeroOptions()
        self.seed = seed
        self.full_determinism = full_determinism
        self.tensor_parallel_size = tensor_parallel_size
        self.sequence_parallel_size = sequence_parallel_size
        self.config = deepspeed_config(
            zero_stage=zero_stage,
            precision=self.precision,
            micro_batch_size=micro_train_batch_size,
            max_norm=max_norm,
            grad_accum_dtype=grad_accum_dtype,
            options=self.zero,
            tensor_parallel_size=tensor_parallel_size,
        )
        if ds_config is not None:
            self.config = merge_user_config(self.config, ds_config, train_batch_size, sequence_parallel_size)
        self.device, self.heap = torch.device("cpu"), Heap()
        self.rank = 0
        self.local_rank = 0
        self.world_size = 1
        self.mesh = Mesh()

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def setup_distributed(self, settings: Mapping[str, Any] | None = None) -> None:
        """Join the process group, choose the device and seed every generator.

        Args:
            settings: what else must be the same on all ranks, keyed by its name in the error message.

        Raises:
            ConfigError: the ranks differ in a setting, this device does not compute in the dtype, or the ranks cannot
                be divided as asked.
        """
        self.device, self.local_rank = start_process()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # Before anything else that the ranks do together: what differs would end in a hang, an abort, or a wrong run.
        check_all_agree(self, settings or {})
        names = ("precision", "seed", "full_determinism", "tensor_parallel_size", "sequence_parallel_size")
        own = {name: vars(self)[name] for name in names} | asdict(self.zero)
        check_all_agree(self, own | flat_config(self.config))
        self.mesh = make_mesh(self.tensor_parallel_size, self.sequence_parallel_size)
        check_ranks(self.zero, self.world_size)
        check_device(self.zero, self.device)
        check_computes(self.device, self.precision, deepcompile=self.zero.deepcompile)
        (enable_full_determinism if self.full_determinism else set_seed)(self.seed)

    @property
    def data_rank(self) -> int:
        """Which share of the rows this rank runs; ranks that share a model's weights or a row's tokens run the same."""
        return self.mesh.data_rank

    @property
    def data_size(self) -> int:
        """How many shares of the rows there are."""
        return self.mesh.data_size

    @property
    def random_rank(self) -> int:
        """Ranks with the same number must draw the same: all of those that share a model's weights."""
        return self.mesh.data_rank if self.mesh.cut == "weights" else self.rank

    @property
    def load_dtype(self) -> torch.dtype:
        """The dtype to load parameters in; DeepSpeed makes float32 masters of the halves."""
        if self.zero_stage == 0 and self.precision == "bf16":
            return torch.float32
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]

    def model_loading(self) -> AbstractContextManager[None]:
        """Models loaded inside are born sharded under ZeRO-3, so that no rank ever holds a whole one."""
        return born_sharded(self.config, self.zero.zpg) if self.zero_stage == 3 else contextlib.nullcontext()

    def share_model(self, model: Any) -> None:
        """Leave each rank its part of a loaded model's weights or of each row's tokens, where ranks share them.

        To be called before `create_optimizer`.

        Raises:
            ConfigError: the model cannot be cut so.
        """
        if self.mesh.cut == "weights":
            split_model(model, self.mesh)
        elif self.mesh.cut == "tokens":
            model.share_tokens(SharedTokens(self.mesh))

    def create_optimizer(
        self, model: nn.Module, *, lr: float, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.0
    ) -> Optimizer:
        """Return AdamW over the model's trainable parameters; norms and biases (one dimension) do not decay.

        On a GPU it is torch's fused one. Where `adam_offload` keeps its states beside a GPU it is DeepSpeed's, made for
        processors, if that can be built there; all ranks must call it then.

        Raises:
            ConfigError: no parameter trains.
        """
        groups = parameter_groups(model, weight_decay)
        is_on_gpu = self.device.type == "cuda"
        if is_on_gpu and self.zero.adam_offload and has_cpu_adam(self):
            return cpu_adam(groups, lr=lr, betas=betas)
        return AdamW(groups, lr=lr, betas=betas, fused=is_on_gpu and not self.zero.adam_offload)

    def prepare(
        self, training: tuple[Any, Optimizer, Schedule], ref_model: Any = None
    ) -> tuple[tuple[Any, Optimizer, Schedule], Any]:
        """Return ((engine, optimizer, scheduler), reference), made of `Actor`s for this device and ZeRO stage.

        The scheduler stays ours: it advances only with applied updates.

        Raises:
            ConfigError: policy and reference share parameters.
        """
        model, optimizer, scheduler = training
        if ref_model is not None and {*map(id, model.parameters())} & {*map(id, ref_model.parameters())}:
            raise ConfigError(
                "ref_model: must have parameters of its own, which stay as they are; got the policy's. Load the model "
                "a second time, or copy it before it is given to the Actor."
            )
        model.run_on(self.device)
        sizes = [(whole_shape(p).numel(), p.requires_grad) for p in model.parameters()]
        self.config["zero_optimization"] = add_sizes(
            self.config["zero_optimization"],
            [numel for numel, trains in sizes if trains],
            [numel for numel, trains in sizes if not trains],
        )
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self.config, dist_init_required=False
        )
        if self.zero.deepcompile:
            engine.compile()
        # The models are made, alike on every rank; an adapter's dropout must not be.
        torch.manual_seed(self.seed + self.random_rank)
        frozen = None if ref_model is None else self.prepare_frozen(ref_model, offload=self.zero.ref_offload)
        return (engine, optimizer, scheduler), frozen

    def prepare_frozen(self, model: Any, *, offload: bool = False) -> Any:
        """Return an `Actor` only for no_grad forwards, cut and sharded as the strategy does."""
        self.share_model(model)
        model.run_on(self.device)
        model.requires_grad_(False)
        model.eval()
        if self.zero_stage < 3:
            return model if offload else model.to(self.device)
        config = frozen_config(
            zero_stage=3,
            precision=self.precision,
            micro_batch_size=self.micro_batch_size,
            offload=offload,
            options=self.zero,
            tensor_parallel_size=self.tensor_parallel_size,
        )
        engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
        return engine

    @contextlib.contextmanager
    def passing_model(self, model: nn.Module) -> Iterator[Any]:
        """Give `prepare_frozen(model)`, and take the memory of its parameters back afterwards."""
        prepared = self.prepare_frozen(model)
        try:
            yield prepared
        finally:
            if prepared is not model:
                prepared.destroy()
            empty(model)
            del prepared, model
            gc.collect()
            deepspeed.accelerator.get_accelerator().empty_cache()

    @contextlib.contextmanager
    def reference_forward(self, ref_model: nn.Module) -> Iterator[None]:
        """Reference forwards run inside: without gradient, in the policy's precision, on its device."""
        moves = self.zero.ref_offload and self.zero_stage < 3
        if moves:
            ref_model.to(self.device)
        autocast = self.zero_stage == 0 and self.precision == "bf16"
        with torch.no_grad(), torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=autocast):
            yield
        if moves:
            ref_model.to("cpu")

    @contextlib.contextmanager
    def weights_for_generation(self, engine: Any) -> Iterator[None]:
        """Inside, `engine.module` may generate, without gradient and in training's precision; all ranks must call it.

        At ZeRO 3 every rank holds all weights meanwhile, where they fit. Else, and with `param_offload`, each layer's
        are gathered for each token, which is several times slower, and all ranks must run as many forwards.
        """
        autocast = self.zero_stage == 0 and self.precision == "bf16"
        weights: AbstractContextManager[None] = contextlib.nullcontext()
        if self.zero_stage == 3:
            is_tight = self.zero.param_offload or not fits_whole(engine.module, self.device)
            any_is_tight = self.all_reduce([float(is_tight)], op="max")[0] > 0
            weights = direct_forward(engine.module) if any_is_tight else whole_weights(engine)
        with weights, torch.no_grad(), torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=autocast):
            yield

    # ---- a step -----------------------------------------------------------------------------------------------------

    def set_learning_rates(self, engine: Any, rates: list[float]) -> None:
        """Set each parameter group's learning rate for the next update."""
        for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def backward(self, engine: Any, loss: Tensor, *, is_last: bool) -> None:
        """Add a micro-batch's gradient.

        The forward must have gone through `engine(...)` right before: ZeRO-3 drops micro-batches otherwise.

        Args:
            loss: scalar: this micro-batch's part of the global loss, so that the parts of all ranks and
                micro-batches add up to it, those that share rows counted once. DeepSpeed averages over ranks, hence the
                factor: over those of one part of the weights, or over all.
            is_last: whether it is the step's last micro-batch on this rank.
        """
        engine.set_gradient_accumulation_boundary(is_last)
        averaged_over = self.data_size if self.mesh.cut == "weights" else self.world_size
        with self.heap.during_backward() if self.device.type == "cpu" else contextlib.nullcontext():
            engine.backward(loss * averaged_over, scale_wrt_gas=False)

    def step(self, engine: Any) -> StepResult:
        """Clip, update and clear the gradients.

        Raises:
            TrainingError: a gradient is not finite (outside fp16), or fp16's loss scale is at its smallest.
        """
        return step_with_loss_scale(engine) if self.precision == "fp16" else step(engine, self.mesh, self.zero_stage)

    def loss_scale(self, engine: Any) -> dict[str, float]:
        """Return float16's loss scale and its counters, for a checkpoint to keep; nothing in other precisions."""
        return loss_scale(engine) if self.precision == "fp16" else {}

    def restore_loss_scale(self, engine: Any, saved: dict[str, float]) -> None:
        """Put back what `loss_scale` returned."""
        if self.precision == "fp16":
            vars(engine.optimizer.loss_scaler).update(saved)

    # An engine's state goes to the files of a checkpoint and back.
    save_engine = staticmethod(save_engine)
    load_engine = staticmethod(load_engine)

    # ---- collectives: every rank calls them, on fixed shapes --------------------------------------------------------

    def all_reduce(self, values: list[float] | Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Return the element-wise sum over the shares of the rows, or the maximum over all ranks, float64."""
        tensor = torch.as_tensor(values, dtype=torch.float64, device=self.device).clone()
        if op == "sum":
            dist.all_reduce(tensor, group=self.mesh.data_group)
        else:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def gather_rows(self, values_LC: Tensor, lines: list[int] | None = None) -> np.ndarray:
        """Return all shares' rows one below the other, [N, C] float64; ranks may hold different numbers, or none.

        Ranks that share rows must hold the same ones.

        Args:
            lines: how many are in each share, where that is known; else the ranks ask each other first.
        """
        return gather_lines(values_LC.to(self.device), lines, self.mesh)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's (small, picklable) value, in rank order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()
