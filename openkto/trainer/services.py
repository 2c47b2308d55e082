"""What a run may be given besides its models, its rows and its settings."""

from collections.abc import Sequence
from dataclasses import dataclass

from openkto.distributed.checkpoint import Checkpoints
from openkto.process.stops import StopRequest
from openkto.process.watchdog import Watchdog
from openkto.trainer.callbacks import Callback
from openkto.trainer.samples import Samples


@dataclass(frozen=True)
class Services:
    """What a `KTOTrainer` uses while it runs; each is optional.

    Args:
        checkpoints: where they lie; None takes the folder from `args` of `fit`.
        stop: whether the process was asked to stop; None listens to signals while `fit` runs.
        watchdog: told of progress; None is none.
        samples: prompts that the policy answers before training, at each evaluation and at the end.
        callbacks: told of each step, evaluation and checkpoint.
    """

    checkpoints: Checkpoints | None = None
    stop: StopRequest | None = None
    watchdog: Watchdog | None = None
    samples: Samples | None = None
    callbacks: Sequence[Callback] = ()
