"""A tokenizer out of GGUF metadata: byte-level BPE and SentencePiece vocabularies. No torch.

GGUF keeps tokens, types, merges or scores, and the *name* of a pre-tokenizer, not its rules. The
rules below are those of the published tokenizers of each family.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.core.errors import MissingExtraError, ModelError
from pagemill.models.tokenizer import Tokenizer

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Token types of the GGUF specification."""
_SPECIAL_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""What GGUF calls a special token, and what chat templates call it."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS_AT_ONCE = {"qwen2": 1, "llama-bpe": 3, "llama3": 3, "llama-v3": 3}
_PLAIN = ("default", "gpt-2", "gpt2")


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises ModelError for a vocabulary kind or pre-tokenizer that is not known."""
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("a tokenizer", "engine") from error
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(
            "this GGUF file carries no tokenizer: convert the model with its tokenizer"
        )
    try:
        return _build(tokenizers, metadata, tokens)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelError(
            f"the tokenizer of this GGUF file is damaged ({error}): get the file again"
        ) from error


def _build(library: Any, metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _byte_level(library, metadata, tokens)
    elif kind == "llama":
        backend = _sentence_piece(library, metadata, tokens)
    else:
        raise ModelError(f"the GGUF tokenizer kind {kind!r} is not supported; gpt2 and llama are")
    _add_special(library, backend, metadata, tokens)
    special = {
        f"{ours}_token": tokens[index]
        for theirs, ours in _SPECIAL_NAMES.items()
        if isinstance(index := metadata.get(f"tokenizer.ggml.{theirs}_token_id"), int)
        and index < len(tokens)
    }
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError("the chat template of this GGUF file is no text: get the file again")
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=template,
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")),
        num_embeddings=len(tokens),
    )


def _byte_level(library: Any, metadata: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges") or ()]
    pre = str(metadata.get("tokenizer.ggml.pre") or "default")
    backend = library.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=_DIGITS_AT_ONCE.get(pre) == 3,
        )
    )
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=pre not in _DIGITS_AT_ONCE
    )
    if pre in _DIGITS_AT_ONCE:
        words = library.Regex(_WORDS % _DIGITS_AT_ONCE[pre])
        split = pre_tokenizers.Split(words, behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre in _PLAIN:
        backend.pre_tokenizer = byte_level
    else:
        known = ", ".join((*_DIGITS_AT_ONCE, "smollm", *_PLAIN))
        raise ModelError(f"the GGUF pre-tokenizer {pre!r} is not known; known are {known}")
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(library: Any, metadata: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    from tokenizers import decoders, models, normalizers

    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges_of_scores(vocab, metadata.get("tokenizer.ggml.scores") or ())
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = library.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=tokens[unknown] if isinstance(unknown, int) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    tail: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.insert(0, normalizers.Prepend("▁"))
        tail.append(decoders.Strip(content=" ", left=1, right=0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(tail)
    return backend


def _merges_of_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose joined token has the best score: as BPE merges,
    every split of every token into two tokens, ordered by the token's score."""
    if len(scores) != len(vocab):
        raise ModelError("this GGUF file's tokenizer has no score for every token: it is damaged")
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], left, right, token[:cut], token[cut:]))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _add_special(
    library: Any, backend: Any, metadata: Mapping[str, Any], tokens: Sequence[str]
) -> None:
    types = metadata.get("tokenizer.ggml.token_type") or ()
    control = [tokens[i] for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)]
    defined = [tokens[i] for i, kind in enumerate(types) if kind == USER_DEFINED]
    backend.add_special_tokens([library.AddedToken(t, normalized=False) for t in control])
    backend.add_tokens([library.AddedToken(t, normalized=False) for t in defined])
