"""SentencePiece's BPE in plain words, and a small vocabulary of its kind as GGUF metadata."""

from collections import Counter
from itertools import pairwise
from typing import Any

from model.checkpoints import SENTENCES

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def small_vocabulary(*, add_space_prefix: bool) -> dict[str, Any]:
    """GGUF metadata: special tokens, all bytes, then pieces, the frequent ones with better scores.

    No letter stands three times in a row, so that no piece can be merged in two ways at a time.
    """
    text = "▁".join(" ".join(SENTENCES[:5]).split())
    counts = Counter(
        text[start : start + size]
        for size in (2, 3, 4, 5)
        for start in range(len(text) - size)
        if "▁" not in text[start + 1 : start + size]
    )
    pieces = [piece for piece, _ in counts.most_common(250)]
    letters = sorted(set(text))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(letters))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(letters))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + letters,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


def naive_encode(metadata: dict[str, Any], text: str) -> list[int]:
    """Merge the two neighbours whose joined piece scores best, the leftmost of equals, until none
    is left; what is no piece then is spelled in bytes. Adds BOS."""
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    prefix = " " if metadata["tokenizer.ggml.add_space_prefix"] and text else ""
    symbols = list((prefix + text).replace(" ", "▁"))
    while True:
        joined = [a + b for a, b in pairwise(symbols)]
        ranked = [(scores[ids[piece]], -i) for i, piece in enumerate(joined) if piece in ids]
        if not ranked:
            break
        at = -max(ranked)[1]
        symbols[at : at + 2] = [joined[at]]
    out = [metadata["tokenizer.ggml.bos_token_id"]]
    for symbol in symbols:
        spelled = [f"<0x{byte:02X}>" for byte in symbol.encode()]
        out += [ids[symbol]] if symbol in ids else [ids[byte] for byte in spelled]
    return out
