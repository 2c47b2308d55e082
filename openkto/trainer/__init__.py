"""The training loop, the evaluation and what they report."""

from openkto.trainer.kto_trainer import KTOTrainer
from openkto.trainer.reporter import FitArgs

__all__ = ["FitArgs", "KTOTrainer"]
