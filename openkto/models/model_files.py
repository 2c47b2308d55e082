"""The files of a model, or of an adapter, in a folder: which are there, and whether they are complete."""

import json
from pathlib import Path

SAFETENSORS = ("model.safetensors", "model-?????-of-?????.safetensors", "adapter_model.safetensors")
TEMPLATES = "additional_chat_templates"  # the folder of all but the first
# A folder with none of these has no tokenizer. Patterns, as a tokenizer with code of its own reads files of any name.
TOKENIZERS = ("tokenizer*", "tekken*", "vocab*", "merges*", "bpe*", "*.model", "*.spm", "*.tiktoken")
# What a tokenizer is copied and uploaded with.
BESIDE = ("special_tokens_map.json", "added_tokens.json", "tokenization_*.py", "chat_template*", TEMPLATES)
TOKENIZER_FILES = (*TOKENIZERS, *BESIDE)
# What an export, of a model or of an adapter, may have left; others in the folder are the user's. It is deleted, so of
# a tokenizer these are the names that libraries give its files, and no patterns that one of the user's could fit.
EXPORTED = (
    *("config.json", "generation_config.json", "adapter_config.json"),
    *SAFETENSORS,
    *("model.safetensors.index.json", "pytorch_model*.bin", "adapter_model.bin"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("tekken.json", "vocab.json", "vocab.txt", "merges.txt", "bpe.codes", "*.tiktoken", "spiece.model", "spm.model"),
    *("sentencepiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", f"{TEMPLATES}/*.jinja"),
)
CARD = "README.md"
CARD_MARK = "<!-- Written by OpenKTO, and again with every model here. Delete this line to keep what you change. -->"
SIGNS = {"adapter_config.json": "an adapter", "config.json": "a model"}


def exported_files(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of all files of a model or an adapter, by their names in the folder."""
    found = {path for pattern in EXPORTED for path in folder.glob(pattern) if path.is_file()}
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(found)}


def remove_exported(folder: Path, kept: set[str]) -> None:
    """Delete what an earlier export left, except for some names: a model with files of another one is broken."""
    for name in exported_files(folder).keys() - kept:
        (folder / name).unlink()
    card = folder / CARD
    if card.name not in kept and card.is_file() and _is_made(card.read_bytes()):
        card.unlink()


def _is_made(card: bytes) -> bool:
    """Whether a model card is as OpenKTO or peft made it, and not somebody's own."""
    return CARD_MARK.encode() in card or (b"\nlibrary_name: peft" in card and b"OpenKTO" not in card)


def kind_of_model(folder: Path) -> str | None:
    """Return "a model" or "an adapter", whichever lies in a folder, and None where neither does."""
    found = [kind for name, kind in SIGNS.items() if (folder / name).exists()]
    weights = [name for name in exported_files(folder) if name.endswith((".safetensors", ".bin"))]
    return found[0] if found else "a model" if weights else None


def problem_with_model(folder: Path, sizes: dict[str, int] | None) -> str | None:
    """Return what is missing of the model in a folder, or cut, or None; weights are not read through.

    Args:
        sizes: those of all its files when it was saved, in bytes; None where nobody wrote them down.
    """
    held = exported_files(folder)
    weights = [name for name in held if name.endswith(".safetensors")]
    if not any(name in held for name in SIGNS) or not weights:
        return "no model is there"
    for name, size in (sizes or {}).items():
        if held.get(name) != size:
            return f"{name} has {held[name]} bytes of {size}" if name in held else f"{name} is missing"
    cut = [name for name in weights if not is_whole(folder / name)]
    return f"{cut[0]} is cut or damaged" if cut else None


def is_whole(file: Path) -> bool:
    """Whether a safetensors file's header can be read and agrees with the file's size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > size:
                return False
            tensors = json.loads(opened.read(length))
        ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
        return size == 8 + length + max(ends, default=0)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False
