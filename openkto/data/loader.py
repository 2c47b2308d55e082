"""The old import path of the loader, kept for users of the library."""

from openkto.batches.loader import KTODataLoader

__all__ = ["KTODataLoader"]
