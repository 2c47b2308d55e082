"""The name under which users of the library have imported the loader."""

from openkto.batches.loader import KTODataLoader

__all__ = ["KTODataLoader"]
