"""The run: every context once in the reference, once in each format and mode, then its controls.

reference   fp32 KV, the same weights and chunks
cascade     the context is computed by a cache that reads what it wrote in the format
store       the context's exact KV is coded in the format; only questions are computed through it
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagemill.bench.quality.bars import BARS
from pagemill.bench.quality.draft import Context, Question, make_context
from pagemill.bench.quality.scores import QuestionScore
from pagemill.bench.quality.tasks import KINDS
from pagemill.bench.quality.texts import load_texts
from pagemill.core.config import KV_FORMATS
from pagemill.core.errors import ConfigError

if TYPE_CHECKING:
    from pagemill.models.decoder import Decoder
    from pagemill.models.loader import Model
    from pagemill.runtime.cache_run import Answer, CacheRun

REFERENCE = "fp32"
FORMATS = tuple(name for name in KV_FORMATS if name in BARS)
MODES = ("cascade", "store")
MIN_LENGTH = 512
QUICK_LENGTHS = (1024,)
QUICK_CONTEXTS = 2
DEFAULT_LENGTHS = (1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class QualityConfig:
    """What is measured. ``num_contexts`` of each kind at each length; lengths that the model cannot
    hold are an error where ``is_exact_length``, else left out."""

    model: str
    formats: tuple[str, ...]
    lengths: tuple[int, ...]
    is_exact_length: bool = True
    modes: tuple[str, ...] = ("cascade",)
    kinds: tuple[str, ...] = tuple(KINDS)
    num_contexts: int = 2
    seed: int = 0
    dtype: str = "float32"
    chunk_tokens: int = 512
    block_size: int = 16
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if not self.formats:
            raise ConfigError("name a KV format at least")
        for kv_format in self.formats:
            if kv_format not in FORMATS:
                raise ConfigError(f"KV format {kv_format!r}: choose from {', '.join(FORMATS)}")
        for kind in self.kinds:
            if kind not in KINDS:
                raise ConfigError(f"contexts of {kind!r}: choose from {', '.join(KINDS)}")
        if min(self.lengths, default=0) < MIN_LENGTH:
            raise ConfigError(f"contexts must have {MIN_LENGTH} tokens at least: see --lengths")
        if self.num_contexts < 1:
            raise ConfigError(f"--contexts {self.num_contexts}: there must be at least one")
        if self.chunk_tokens < 1:
            raise ConfigError(f"--chunk {self.chunk_tokens}: there must be at least one token")


@dataclass(slots=True)
class Measured:
    """All scores by (format, mode); controls by the name of the format that was damaged."""

    model: str
    texts: str
    scores: dict[tuple[str, str], list[QuestionScore]] = field(default_factory=dict)
    self_scores: list[QuestionScore] = field(default_factory=list)
    poisoned: dict[str, list[QuestionScore]] = field(default_factory=dict)


OnStep = Callable[[str, int, int], None]
"""(what is done, steps done, steps in all)."""


def measure(config: QualityConfig, on_step: OnStep = lambda words, done, total: None) -> Measured:
    """Run all of it. Raises PagemillError."""
    from pagemill.runtime.cache_run import open_decoder

    texts = load_texts()
    on_step(f"loading {config.model}", 0, 1)
    model, decoder = open_decoder(
        config.model,
        config.lengths,
        is_exact=config.is_exact_length,
        dtype=config.dtype,
        num_threads=config.num_threads,
    )
    run = _Run(config, model, decoder, on_step)
    contexts = [
        make_context(
            kind,
            KINDS[kind],
            texts,
            model.tokenizer.encode,
            length=length,
            index=index,
            seed=config.seed,
        )
        for length in sorted(config.lengths)
        if length <= model.config.max_positions
        for index in range(config.num_contexts)
        for kind in config.kinds
    ]
    found = Measured(model.name, texts.source)
    run.num_steps = len(contexts) * (1 + len(config.formats) * len(config.modes)) + len(
        config.kinds
    )
    for number, context in enumerate(contexts):
        run.add(context, found, is_control=number < len(config.kinds))
    return found


class _Run:
    """What all contexts share: the model, the settings, the count of steps."""

    def __init__(
        self, config: QualityConfig, model: "Model", decoder: "Decoder", on_step: OnStep
    ) -> None:
        from pagemill.engine.kv_choice import key_centers

        self._config, self._model, self._decoder = config, model, decoder
        self._centers = key_centers(model.config, model.weights)
        self._on_step = on_step
        self._num_done = 0
        self.num_steps = 0

    def add(self, context: Context, found: Measured, *, is_control: bool) -> None:
        """Score a context in the reference and in every format and mode."""
        reference = self._prefilled(REFERENCE, context)
        exact = _answer(reference, context.turns)
        if is_control:
            again = _answer(self._prefilled(REFERENCE, context), context.turns)
            found.self_scores += self._score(context, REFERENCE, exact, again)
        for kv_format in self._config.formats:
            for mode in self._config.modes:
                self._tell(kv_format, context, mode)
                run = self._made(kv_format, mode, context, reference)
                answers = _answer(run, context.turns)
                scores = found.scores.setdefault((kv_format, mode), [])
                scores += self._score(context, kv_format, exact, answers)
            if is_control and kv_format != REFERENCE:
                run = self._made(kv_format, "store", context, reference)
                run.poison()
                answers = _answer(run, context.turns[:1])
                scores = found.poisoned.setdefault(kv_format, [])
                scores += self._score(context, kv_format, exact, answers)

    def _prefilled(self, kv_format: str, context: Context) -> "CacheRun":
        if kv_format == REFERENCE:
            self._tell(kv_format, context, "reference")
        return self._made(kv_format, "cascade", context, None)

    def _made(
        self, kv_format: str, mode: str, context: Context, reference: "CacheRun | None"
    ) -> "CacheRun":
        """A cache that holds the context."""
        from pagemill.runtime.cache_run import CacheRun, KvChoice

        size = self._config.block_size
        centers = None if kv_format == REFERENCE else self._centers
        num_forks = sum(map(len, context.turns))
        tokens = len(context.token_ids) + sum(len(q.token_ids) for t in context.turns for q in t)
        choice = KvChoice(kv_format, centers, size)
        run = CacheRun(self._decoder, choice, tokens, num_forks)
        if mode == "cascade":
            run.prefill(context.token_ids, self._config.chunk_tokens)
        else:
            assert reference is not None
            run.recode(reference, len(context.token_ids))
        return run

    def _score(
        self, context: Context, kv_format: str, exact: Sequence["Answer"], got: Sequence["Answer"]
    ) -> list[QuestionScore]:
        """One score an answer; ``got`` may end before the last turns."""
        from pagemill.runtime.compare import compare

        found = []
        for (num_before, question), expected, answer in zip(
            _in_order(context), exact, got, strict=False
        ):
            targets = list(question.answer_ids)
            found.append(
                QuestionScore(
                    context=f"{context.kind} {context.length} {context.index}",
                    length=context.length,
                    task=question.task,
                    depth=question.depth,
                    tokens=compare(self._decoder, expected.hidden, answer.hidden, targets),
                    context_bytes=answer.context_bytes,
                    expected_bytes=self._expected_bytes(kv_format, num_before),
                )
            )
        return found

    def _expected_bytes(self, kv_format: str, num_tokens: int) -> int:
        """Context tokens x layers x bytes of the format, for the tokens that a layer still sees."""
        from pagemill.kernels.layout import KvLayout

        config, size = self._model.config, self._config.block_size
        layout = KvLayout(kv_format, size, config.num_kv_heads, config.head_dim)
        seen = [num_tokens if w is None else min(num_tokens, w - 1) for w in config.windows]
        raw = num_tokens % 16 if layout.tail_bytes else 0
        coded = sum(seen) - raw * len(seen)
        return coded * layout.tile_bytes // size + raw * len(seen) * layout.tail_bytes // 16

    def _tell(self, kv_format: str, context: Context, mode: str) -> None:
        words = f"{kv_format} {mode}: {context.kind}, {context.length} tokens"
        self._on_step(words, self._num_done, self.num_steps)
        self._num_done += 1


def _in_order(context: Context) -> list[tuple[int, Question]]:
    """Each question with the tokens of the context that its turn finds."""
    found, num_before = [], len(context.token_ids)
    for turn in context.turns:
        found += [(num_before, question) for question in turn]
        num_before += len(turn[0].token_ids)
    return found


def _answer(run: "CacheRun", turns: Sequence[Sequence[Question]]) -> list["Answer"]:
    """Ask turn after turn; each next one finds the first question of the last, and its answer."""
    found = []
    for number, turn in enumerate(turns):
        if number:
            run.adopt(0)
        found += run.answers([(question.prompt_ids, question.answer_ids) for question in turn])
    return found
