"""One token in an answer: its bytes, and a text that tells it from every other token.

    whole text                                   the text itself        the mill
    bytes that are no whole character            bytes:\\xHH...          bytes:\\xe2\\x80
    a text that an earlier entry of a map has    token_id:N             token_id:30

The second is OpenAI's way; the third is vLLM's of ``return_tokens_as_token_ids``.
"""

import re
from collections.abc import Iterable

from pagemill.core.step import TokenLogprobs
from pagemill.models.tokenizer import REPLACEMENT, Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _bytes_of_letters() -> dict[str, int]:
    """The letters that byte-level vocabularies write for bytes (GPT-2, encoder.py)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenForms:
    """Tokens of one vocabulary as answers show them. Changes nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._letters = _bytes_of_letters()

    def both(self, token_id: int) -> tuple[str, bytes]:
        """(what to show, the bytes that the token adds to the text)."""
        text = self._tokenizer.token_text(token_id)
        if REPLACEMENT not in text:
            return text, text.encode("utf-8", "replace")
        data = self._data(token_id, text)
        try:
            return data.decode("utf-8"), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data

    def _data(self, token_id: int, text: str) -> bytes:
        """Of a token whose text has replacement signs: from how the vocabulary writes it."""
        written = self._tokenizer.written(token_id) or ""
        byte = _BYTE_TOKEN.fullmatch(written)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if written and all(letter in self._letters for letter in written):
            return bytes(self._letters[letter] for letter in written)
        return text.encode("utf-8", "replace")

    def alternatives(self, entry: TokenLogprobs) -> tuple[str, dict[str, float]]:
        """(the chosen token, the best by what is shown): no two share a key, and the chosen one is
        always among them, as in vLLM."""
        shown: dict[int, str] = {}
        best: dict[str, float] = {}
        for token_id, value in (*entry.top, (entry.token_id, entry.logprob)):
            if token_id in shown:
                continue
            key = self.both(token_id)[0]
            shown[token_id] = f"token_id:{token_id}" if key in best else key
            best[shown[token_id]] = value
        return shown[entry.token_id], best


def num_characters(parts: Iterable[bytes]) -> int:
    """How many characters begin in these bytes of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for data in parts for byte in data)
