"""Contexts as text, and as tokens of a model: what is asked, what must come, where it stood.

A draft knows no model but for the count of its tokens, by which it is filled. It is then cut into
token ids: one context, and for each question its prompt and its answer.

    length >= | context | the longest chain of turns: prompt and answer of each |
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pagemill.bench.quality.texts import Texts
from pagemill.core.errors import ConfigError
from pagemill.core.random import stream

Encode = Callable[..., list[int]]
"""``Tokenizer.encode``."""

CONTINUE_PROMPT = 8
CONTINUE_TOKENS = 128
COPY_PROMPT = 16
COPY_TOKENS = 20
FIRST_RESERVE = 160
"""Tokens left for questions at the first attempt to fit a length."""
ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Ask:
    """A question as text. ``line`` is where the answer stands in the draft; ``turn`` when it is
    asked: the first question of a turn, with its answer, belongs to the context of the next."""

    task: str
    prompt: str
    answer: str
    line: int
    turn: int = 0


@dataclass(slots=True)
class Draft:
    """Lines of a context and what is asked about them. ``num_copies``: passages to repeat;
    ``tail``: the text that goes on after the context, empty where nothing does."""

    joint: str = "\n"
    lines: list[str] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    num_copies: int = 0
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Kit:
    """What a draft is made of: chance, texts, and room for ``room`` tokens by ``count``."""

    rng: random.Random
    texts: Texts
    count: Callable[[str], int]
    room: int

    def spread(self, num_slots: int, num_chosen: int) -> list[int]:
        """Places among ``num_slots``, evenly spread with some chance, in order."""
        chosen = min(num_chosen, num_slots)
        edges = [i * num_slots // chosen for i in range(chosen + 1)] if chosen else []
        return [self.rng.randrange(a, b) for a, b in pairwise(edges)]

    def words(self, number: int) -> list[str]:
        return self.rng.sample(self.texts.words, number)


@dataclass(frozen=True, slots=True)
class Question:
    """``prompt_ids`` are asked, ``answer_ids`` are scored. ``depth``: where in the context the
    answer stands, 0 its start, 1 its end."""

    task: str
    depth: float
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.answer_ids


@dataclass(frozen=True, slots=True)
class Context:
    """A prefill and the questions about it, in turns. ``length`` is what was asked for."""

    kind: str
    length: int
    index: int
    token_ids: tuple[int, ...]
    turns: tuple[tuple[Question, ...], ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: the context, adopted questions, a question."""
        adopted, most = len(self.token_ids), 0
        for turn in self.turns:
            most = max(most, adopted + max(len(q.token_ids) for q in turn))
            adopted += len(turn[0].token_ids)
        return most


def make_context(
    kind: str,
    fill: Callable[[Kit], Draft],
    texts: Texts,
    encode: Encode,
    *,
    length: int,
    index: int,
    seed: int,
) -> Context:
    """A context whose longest sequence has nearly ``length`` tokens, and no more."""
    room = length - FIRST_RESERVE

    def count(text: str) -> int:
        return len(encode(text, add_special_tokens=False))

    for _ in range(ATTEMPTS):
        rng = stream(seed, f"quality {kind} {length} {index}")
        draft = fill(Kit(rng, texts, count, room))
        context = _cut(kind, draft, rng, encode, length, index)
        if context.longest <= length:
            return context
        room -= context.longest - length + 8
    raise ConfigError(f"no context of {length} tokens can be made of {kind}: ask for a longer one")


def _cut(
    kind: str, draft: Draft, rng: random.Random, encode: Encode, length: int, index: int
) -> Context:
    text = draft.joint.join(draft.lines) + draft.joint
    ids = encode(text)
    starts, at = [], 0
    for line in draft.lines:
        starts.append(at / len(text))
        at += len(line) + len(draft.joint)
    turns: list[list[Question]] = [
        [] for _ in range(1 + max((a.turn for a in draft.asks), default=0))
    ]
    for ask in draft.asks:
        prompt, answer = _split(encode, ask.prompt, ask.answer)
        turns[ask.turn].append(Question(ask.task, starts[ask.line], prompt, answer))
    turns[0] += _copies(draft.num_copies, ids, rng, encode)
    if draft.tail:
        turns[0].append(_continuation(draft.tail, encode))
    return Context(kind, length, index, tuple(ids), tuple(map(tuple, turns)))


def _split(encode: Encode, prompt: str, answer: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt and answer as they are encoded together: a token that holds the end of the prompt and
    the start of the answer belongs to the answer."""
    alone = encode(prompt, add_special_tokens=False)
    both = encode(prompt + answer, add_special_tokens=False)
    same = 0
    while same < len(alone) and alone[same] == both[same]:
        same += 1
    return tuple(both[:same]), tuple(both[same:])


def _copies(number: int, ids: Sequence[int], rng: random.Random, encode: Encode) -> list[Question]:
    """A passage begins again after a blank line, and must go on as it did."""
    blank = encode("\n\n", add_special_tokens=False)
    slots = len(ids) - COPY_PROMPT - COPY_TOKENS
    questions = []
    for number_of in range(number if slots > number else 0):
        at = rng.randrange(number_of * slots // number, (number_of + 1) * slots // number)
        middle = at + COPY_PROMPT
        prompt = (*blank, *ids[at:middle])
        answer = tuple(ids[middle : middle + COPY_TOKENS])
        questions.append(Question("copy", at / len(ids), prompt, answer))
    return questions


def _continuation(tail: str, encode: Encode) -> Question:
    ids = encode(tail, add_special_tokens=False)[: CONTINUE_PROMPT + CONTINUE_TOKENS]
    return Question("text", 1.0, tuple(ids[:CONTINUE_PROMPT]), tuple(ids[CONTINUE_PROMPT:]))
