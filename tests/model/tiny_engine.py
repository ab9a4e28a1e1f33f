"""An engine over a tiny random model, driven step by step without its thread."""

from pathlib import Path
from typing import Any

from model.checkpoints import random_model, save_folder
from pagemill.core.config import EngineConfig
from pagemill.core.request import SamplingParams
from pagemill.core.step import TokenLogprobs
from pagemill.engine.build import BuiltEngine, build_engine
from pagemill.engine.engine import Engine, Generate, Piece

TOP = 5
MAX_DIFFERENCE = 1e-3
NEAR_TIE = 1e-4


def tiny_checkpoint(folder: Path, case: str) -> Path:
    return save_folder(random_model(case), folder / case)


class Run:
    """What came out of one request."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    @property
    def token_ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [entry for piece in self.pieces for entry in piece.logprobs]

    @property
    def num_cached_tokens(self) -> int:
        return self.pieces[-1].usage.num_cached_tokens

    def same_as(self, other: "Run") -> bool:
        """Equal tokens and five best log-probabilities; a difference at a near tie is none."""
        assert len(self.logprobs) == len(self.token_ids) > 0
        for mine, theirs in zip(self.logprobs, other.logprobs, strict=True):
            if mine.token_id != theirs.token_id:
                return mine.top[0][1] - mine.top[1][1] <= NEAR_TIE
            pairs = zip(mine.top, theirs.top, strict=True)
            if any(abs(a[1] - b[1]) > MAX_DIFFERENCE for a, b in pairs):
                return False
        return True

    def distance(self, other: "Run") -> float:
        """The largest difference of a log-probability up to the first token that differs; there the
        lead of each run's own token counts, which a small difference may have turned."""
        assert len(self.logprobs) == len(self.token_ids) > 0
        worst = 0.0
        for mine, theirs in zip(self.logprobs, other.logprobs, strict=True):
            if mine.token_id != theirs.token_id:
                return max(worst, *(run.top[0][1] - run.top[1][1] for run in (mine, theirs)))
            ours = dict(theirs.top)
            shared = (abs(x - ours[token]) for token, x in mine.top if token in ours)
            worst = max(worst, *shared)
        return worst


class TinyEngine:
    """``settings`` are fields of EngineConfig; float32 and 200 blocks unless said otherwise."""

    def __init__(self, model: Path, key_file: Path, **settings: Any) -> None:
        settings = {"dtype": "float32", "num_blocks": 200, **settings}
        config = EngineConfig(model=str(model), cache_key_file=key_file, **settings)
        self.built: BuiltEngine = build_engine(config)
        self.engine: Engine = self.built.engine

    def add(self, token_ids: list[int], max_tokens: int = 12, **more: Any) -> Run:
        """Take a request; nothing runs yet."""
        run = Run()
        sampling = SamplingParams(temperature=0.0, logprobs=TOP)
        ask = Generate(token_ids, sampling, max_tokens=max_tokens, ignore_eos=True, **more)
        self.engine.generate_later(ask, run.pieces.append)
        return run

    def run(self) -> None:
        """Step until nothing is left; then every block must be back."""
        while self.engine.step():
            self.engine.scheduler.check_integrity()
        assert sum(group.num_held for group in self.engine.cache.stats().groups) == 0

    def ask(self, token_ids: list[int], max_tokens: int = 12, **more: Any) -> Run:
        run = self.add(token_ids, max_tokens, **more)
        self.run()
        return run

    def close(self) -> None:
        self.engine.close()
