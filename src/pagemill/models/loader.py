"""A model as a whole: config, tokenizer, template, weights, from a folder or a GGUF file."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pagemill.core.errors import ModelError
from pagemill.kernels.linear import first_rows
from pagemill.models import config as configs
from pagemill.models import gguf_tokenizer, tokenizer, weights
from pagemill.models.config import ModelConfig
from pagemill.models.gguf import GgufFile
from pagemill.models.template import ChatTemplate
from pagemill.models.tokenizer import Tokenizer
from pagemill.models.weights import Progress, Weights

SMALL_MODEL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Model:
    """Everything an engine needs of a model. ``template`` is None where the files have none."""

    name: str
    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    weights: Weights
    eos_token_ids: tuple[int, ...]


def load_model(
    path: Path,
    dtype: torch.dtype,
    *,
    template_file: Path | None = None,
    progress: Progress | None = None,
    stays_packed: bool = False,
) -> Model:
    """Load a folder with safetensors or a GGUF file. Raises ModelError with the way out.

    ``stays_packed``: matrices that a GGUF file has quantized stay so where a product for their type
    exists; the others become ``dtype``.
    """
    with _threads_that_pay(path):
        if path.is_dir():
            parts = _open_folder(path, dtype, progress)
        else:
            parts = _open_gguf(path, dtype, progress, stays_packed)
    config, tokens, loaded, eos = parts
    config = _cut_to_vocabulary(config, tokens.vocab_size, loaded)
    source = tokens.chat_template
    if template_file is not None:
        source = _read(template_file)
    return Model(
        name=path.stem if path.is_file() else path.name,
        path=path,
        config=config,
        tokenizer=tokens,
        template=ChatTemplate(source, tokens.special_tokens) if source else None,
        weights=loaded,
        eos_token_ids=_eos(config, tokens, eos),
    )


@contextmanager
def _threads_that_pay(path: Path) -> Iterator[None]:
    """One thread for a small model: its matrices are copied and rounded in pieces so short that
    waking other threads costs more, on a busy machine seven times more (measured on SmolLM2)."""
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files if file.is_file())
    num_threads = torch.get_num_threads()
    if size > SMALL_MODEL_BYTES:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _cut_to_vocabulary(config: ModelConfig, vocab_size: int, loaded: Weights) -> ModelConfig:
    """Without the rows of embedding and head that pad them beyond the tokenizer's last id: no
    token stands for them, so none of them may be sampled."""
    loaded.embedding = first_rows(loaded.embedding, vocab_size)
    loaded.output = first_rows(loaded.output, vocab_size)
    return replace(config, vocab_size=vocab_size)


_Parts = tuple[ModelConfig, Tokenizer, Weights, tuple[int, ...]]


def _open_gguf(
    path: Path, dtype: torch.dtype, progress: Progress | None, stays_packed: bool
) -> _Parts:
    if path.suffix in (".safetensors", ".json", ".bin"):
        raise ModelError(f"{path} is one file of a model folder: name the folder, {path.parent}")
    file = GgufFile(path)
    config = configs.from_gguf(file.metadata, frozenset(file.tensors))
    tokens = gguf_tokenizer.from_gguf(file.metadata)
    loaded = weights.load_gguf(file, config, dtype, progress, stays_packed=stays_packed)
    return config, tokens, loaded, ()


def _open_folder(path: Path, dtype: torch.dtype, progress: Progress | None) -> _Parts:
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path} has no config.json: it is not a model folder; name one, or a GGUF file"
        )
    config = configs.from_hugging_face(_json(path / "config.json"))
    about = _json(path / "tokenizer_config.json", missing_ok=True)
    tokens = tokenizer.from_folder(path, about, config.vocab_size)
    generation = _json(path / "generation_config.json", missing_ok=True)
    eos = generation.get("eos_token_id")
    ids = tuple(i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int))
    return config, tokens, weights.load_safetensors(path, config, dtype, progress), ids


def _json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    if missing_ok and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}): get it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object: get it again")
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ModelError(f"the chat template {path} cannot be read: {error}") from error


def _eos(config: ModelConfig, tokens: Tokenizer, more: tuple[int, ...]) -> tuple[int, ...]:
    """Every id that ends an answer: of the config, the generation config and the tokenizer."""
    ids = [*config.eos_token_ids, *more]
    token = tokens.special_tokens.get("eos_token")
    own = tokens.token_id(token) if token else None
    return tuple(dict.fromkeys([*ids, *([] if own is None else [own])]))
