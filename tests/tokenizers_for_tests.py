"""Small tokenizers built in code: byte-level and sentencepiece-like, with switches for what differs between models."""

from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, UNK = "<s>", "</s>", "<pad>", "<unk>"
START, END = "<|start|>", "<|end|>"

# ChatML's shape: a header, the text, an end-of-turn token and a newline behind it.
CHAT_TEMPLATE = (
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    *,
    bos: Literal["on", "off", "none"] = "off",
    pad: Literal["none", "own", "eos"] = "own",
    has_eos: bool = True,
    adds_eos: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
    merges: tuple[tuple[str, str], ...] = (),
) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer: 256 bytes, then merged tokens, then special ones.

    Args:
        bos: "on": put before raw texts; "off": exists but is not put; "none": there is none.
        pad: "none", a token of its own, or the EOS.
        adds_eos: whether the tokenizer itself puts EOS behind raw texts.
        merges: pairs of byte-level characters (a space is "\\u0120", a newline "\\u010a") that become one token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    for first, second in merges:
        vocabulary.setdefault(first + second, len(vocabulary))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    # Without the usual split into words, so that any merge can cross any boundary.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = ([] if bos == "none" else [BOS]) + ([EOS] if has_eos else []) + ([PAD] if pad == "own" else [])
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*names, START, END)])
    _add_post_processor(backend, has_bos=bos == "on", has_eos=adds_eos)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=None if bos == "none" else BOS,
        eos_token=EOS if has_eos else None,
        pad_token={"none": None, "own": PAD, "eos": EOS}[pad],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def metaspace_tokenizer(
    *, prepend: Literal["always", "first"] = "always", chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """Return a sentencepiece-like tokenizer: a dummy-prefix space, a few pieces, bytes for the rest, BOS on."""
    pieces = [
        "\u2581",
        *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:!?'-",
        "\u2581a",
        "\u2581t",
        "he",
        "\u2581the",
    ]
    vocabulary = {UNK: 0, BOS: 1, EOS: 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in pieces:
        vocabulary[piece] = len(vocabulary)
    merges = [("\u2581", "a"), ("\u2581", "t"), ("h", "e"), ("\u2581t", "he")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=UNK, fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=prepend, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (UNK, BOS, EOS)])
    _add_post_processor(backend, has_bos=True, has_eos=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def _add_post_processor(backend: Tokenizer, has_bos: bool, has_eos: bool) -> None:
    if has_bos or has_eos:
        names = ([BOS] if has_bos else []) + ([EOS] if has_eos else [])
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS + ' ' if has_bos else ''}$A{' ' + EOS if has_eos else ''}",
            special_tokens=[(name, backend.token_to_id(name)) for name in names],
        )
