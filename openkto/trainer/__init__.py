"""The training loop, the evaluation and what they report."""

from openkto.trainer.callbacks import Callback
from openkto.trainer.fit_args import FitArgs
from openkto.trainer.kto_trainer import KTOTrainer
from openkto.trainer.services import Services

__all__ = ["Callback", "FitArgs", "KTOTrainer", "Services"]
