"""Policies and references, their log-probabilities and the objective."""

from openkto.models.actor import Actor, ActorOutput
from openkto.models.loading import load_tokenizer
from openkto.models.loss import KTOLoss

__all__ = ["Actor", "ActorOutput", "KTOLoss", "load_tokenizer"]
