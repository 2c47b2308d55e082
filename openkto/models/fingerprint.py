"""What a model is, as one hash over the files that it is loaded from."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import snapshot_download

from openkto.files import hash_file

# Weights and what shapes them; a tokenizer shows in the rows that it makes.
PATTERNS = ("*.safetensors", "*.bin", "config.json", "adapter_config.json")


def model_fingerprint(name: str) -> str:
    """Return a hash of a model's weights and configuration, the same wherever the files lie.

    Args:
        name: a folder, or a Hub name that has been loaded before and so is in the local cache.
    """
    folder = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, local_files_only=True))
    files = sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})
    with ThreadPoolExecutor(max_workers=4) as threads:  # hashing lets go of the interpreter's lock
        digests = list(threads.map(hash_file, files))
    lines = "".join(f"{path.name} {digest}\n" for path, digest in zip(files, digests, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]
