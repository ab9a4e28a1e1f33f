"""Qwen2.5-Coder-0.5B, whose key biases break 8 bits unless keys are centered. Only with ``--qwen``.

``scripts/fetch-qwen`` brings the file; ``make soak`` runs both. Takes minutes.
"""

from array import array
from pathlib import Path
from threading import Event

import pytest

from pagemill.bench.quality.measure import QualityConfig, measure
from pagemill.bench.quality.results import Row, results
from pagemill.core.config import EngineConfig
from pagemill.core.request import SamplingParams
from pagemill.engine import kv_choice
from pagemill.engine.build import build_engine
from pagemill.engine.engine import Generate, Piece
from pagemill.models.home import home_folder

pytestmark = pytest.mark.qwen


@pytest.fixture(scope="module")
def path() -> Path:
    found = home_folder() / "models" / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    assert found.is_file(), "run scripts/fetch-qwen first (make soak does)"
    return found


def test_the_engine_answers_sanely(path: Path) -> None:
    built = build_engine(
        EngineConfig(model=str(path), dtype="float32", max_model_len=512, num_blocks=64)
    )
    assert (built.model.config.num_layers, built.model.config.num_kv_heads) == (24, 2)
    question = "What is the capital of France? Answer in one sentence."
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    pieces: list[Piece] = []
    done = Event()

    def take(piece: Piece) -> None:
        pieces.append(piece)
        if piece.finish_reason is not None:
            done.set()

    built.engine.start()
    ids = array("I", built.model.tokenizer.encode(prompt))
    built.engine.generate(Generate(ids, SamplingParams(temperature=0), max_tokens=16), take)
    assert done.wait(120)
    built.engine.close()
    assert "".join(piece.text for piece in pieces).strip() == "The capital of France is Paris."


def i8_on_records(path: Path) -> Row:
    config = QualityConfig(str(path), ("i8",), (2048,), kinds=("records",), num_contexts=1)
    (total,) = results(config, measure(config)).totals
    assert total.found.reference_accuracy > 0.95
    print(f"i8: KL {total.found.kl}, p99 {total.found.kl_p99}")
    return total


def test_i8_holds_with_centers_and_breaks_without(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    centered = i8_on_records(path)
    monkeypatch.setattr(kv_choice, "key_centers", lambda config, weights: None)
    plain = i8_on_records(path)
    assert centered.found.kl.high < 0.003
    assert plain.found.kl.value > 3 * centered.found.kl.value
