"""The texts that questions are hidden in: two that come along, or longer ones from a data folder.

With ``PAGEMILL_DATA`` set, ``text/docs2026_mooncake.txt.xz`` and ``text/us_state_union.txt.xz`` of
that folder are read instead, where they are there (docs/benchmarks.md, "Data").
"""

import lzma
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pagemill.core.errors import ConfigError

OWN = Path(__file__).parent / "texts"
UNSEEN = "docs2026_mooncake.txt.xz"
PROSE = "us_state_union.txt.xz"
MIN_PARAGRAPH = 40


@dataclass(frozen=True, slots=True)
class Texts:
    """``unseen`` and ``prose`` as paragraphs without line breaks; ``words`` for lists and keys.

    ``unseen`` is later than the models that are measured, as far as one can know; ``prose`` is old.
    """

    unseen: tuple[str, ...]
    prose: tuple[str, ...]
    words: tuple[str, ...]
    source: str


def load_texts() -> Texts:
    """ConfigError where a text of the data folder cannot be read."""
    folder = Path(os.environ["PAGEMILL_DATA"]) / "text" if "PAGEMILL_DATA" in os.environ else None
    own_prose = _paragraphs(OWN / "prose.txt.xz")
    unseen, prose, source = _paragraphs(OWN / "unseen.txt.xz"), own_prose, ["own"]
    if folder and (folder / UNSEEN).is_file():
        unseen, source = _paragraphs(folder / UNSEEN), [UNSEEN]
    if folder and (folder / PROSE).is_file():
        prose = _paragraphs(folder / PROSE)
        source.append(PROSE)
    return Texts(unseen, prose, _words(own_prose), ", ".join(source))


def _paragraphs(path: Path) -> tuple[str, ...]:
    try:
        text = lzma.open(path, "rt", encoding="utf-8").read()
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise ConfigError(f"the text {path} cannot be read: {error}") from error
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    found = tuple(part for part in parts if len(part) >= MIN_PARAGRAPH)
    if not found:
        raise ConfigError(f"the text {path} has no paragraph: put another there")
    return found


def _words(paragraphs: tuple[str, ...]) -> tuple[str, ...]:
    """Plain words of 4 to 8 letters, each once, in the order of the alphabet."""
    found = re.findall(r"(?<![\w'-])[a-z]{4,8}(?![\w'-])", " ".join(paragraphs))
    return tuple(sorted(set(found)))
