"""Why prompts miss: a log goes through a real cache, and each miss is compared with what was there.

The cache is pagemill's own, with the radix index, ``cache_tokens`` large and nothing else in it.
Requests are taken one after another, in the order of the log. A token is *lost* where the cache
missed it although the same run of text stood in an earlier prompt, and a small change in front of
it is the reason.
"""

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from pagemill.bench.explain_align import Earlier, Memory, shingles
from pagemill.bench.explain_cause import IS_FAULT, Cause, find_cause
from pagemill.bench.explain_read import Broken, LoggedRequest
from pagemill.bench.explain_tokens import Prompt, Prompts, content_text
from pagemill.cache.manager import CacheManager
from pagemill.core.errors import ConfigError
from pagemill.core.layers import CacheConfig, LayerGroup

BLOCK_SIZE = 16
BEGINNING_TOKENS = 2048
"""A template is known by the text at the beginning of its prompts."""
SAME_TEMPLATE = 0.25
"""Prompts are of one template when so much of their beginnings is the same."""
MAX_GROUPS = 10_000
MINUTE_S = 60.0
_CHANGING = re.compile(r"\d+|[0-9a-f]{8,}", re.I)


@dataclass(slots=True)
class Finding:
    """One cause in one group, over all requests it hit. ``example`` is the first of them."""

    example: Cause
    where: str
    earlier_where: str
    num_requests: int = 0
    lost_tokens: int = 0


@dataclass(slots=True)
class Group:
    """Requests of one template, tenant or session. ``lost_tokens`` are those of faults."""

    name: str
    num_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    lost_tokens: int = 0
    findings: dict[tuple[str, int | None], Finding] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def new_tokens(self) -> int:
        """Missed and not lost: text that nobody had sent before, or that stood elsewhere."""
        return self.prompt_tokens - self.hit_tokens - self.lost_tokens

    def sorted_findings(self) -> list[Finding]:
        """Faults first, then by what they cost."""
        found = self.findings.values()
        return sorted(found, key=lambda f: (not IS_FAULT[f.example.kind], -f.lost_tokens))


@dataclass(frozen=True, slots=True)
class Report:
    """``minutes`` is the time from the first to the last request; None without timestamps."""

    by: str
    note: str
    total: Group
    groups: tuple[Group, ...]
    minutes: float | None
    num_broken: int = 0
    broken: tuple[str, ...] = ()
    """Records that could not be read: how many, and what was wrong with the first of them."""

    def per_minute(self, tokens: int) -> float | None:
        return tokens / self.minutes if self.minutes else None


@dataclass(frozen=True, slots=True)
class ExplainConfig:
    """``by``: template, tenant, session, or a field of the log. ``is_isolated``: tenants share
    nothing. Fewer than ``min_lost_tokens`` in one request are no finding."""

    by: str = "template"
    is_isolated: bool = False
    cache_tokens: int = 1 << 24
    min_lost_tokens: int = 64


class Explainer:
    """Takes requests one by one; holds the cache, the last prompts and the counts."""

    def __init__(self, prompts: Prompts, config: ExplainConfig) -> None:
        self._prompts = prompts
        self._config = config
        num_blocks = config.cache_tokens // BLOCK_SIZE + 1
        if num_blocks < 2:
            raise ConfigError(f"--cache-tokens is {config.cache_tokens}: give at least 16")
        groups = (LayerGroup("full", (0,)),)
        self._cache = CacheManager(CacheConfig(groups, (num_blocks,), BLOCK_SIZE))
        self._memories: dict[str, Memory] = {}
        self._namer = _TemplateNamer()
        self._groups: dict[str, Group] = {}
        self._total = Group("all")
        self._times: list[float] = []

    def add(self, request: LoggedRequest) -> None:
        """One more request, as the next that the server would see."""
        prompt = self._prompts.render(request)
        if len(prompt.token_ids) == 0:
            return
        tenant = request.tenant if self._config.is_isolated else ""
        hit = self._serve(prompt, request.output, tenant)
        group = self._group(self._name(request, prompt))
        for one in (group, self._total):
            one.num_requests += 1
            one.prompt_tokens += len(prompt.token_ids)
            one.hit_tokens += hit
        if request.time_s is not None:
            self._times = [
                min([request.time_s, *self._times]),
                max([request.time_s, *self._times]),
            ]
        memory = self._memories.setdefault(tenant, Memory())
        self._explain(request, prompt, hit, memory, group)
        memory.add(Earlier(request, prompt))

    def report(self) -> Report:
        groups = sorted(self._groups.values(), key=lambda g: (-g.lost_tokens, -g.prompt_tokens))
        span_s = self._times[-1] - self._times[0] if self._times else 0.0
        minutes = span_s / MINUTE_S if span_s > 0 else None
        return Report(self._config.by, self._prompts.note, self._total, tuple(groups), minutes)

    def _serve(self, prompt: Prompt, output: str, tenant: str) -> int:
        """Hit tokens. The prompt and the answer, where the log has one, are cached from now on."""
        cache, namespace = self._cache, self._cache.namespace(tenant=tenant)
        answer = self._prompts.coder.encode(output) if output else []
        tokens = np.concatenate([prompt.token_ids, np.array(answer, np.uint32)])
        match = cache.peek_match(array("I", prompt.token_ids.tolist()), namespace)
        if not cache.can_admit(match, len(tokens)):
            return match.num_tokens
        table = cache.open(match, namespace)
        copies = cache.extend(table, len(tokens))
        if copies is not None:
            cache.release_copies(copies)
            cache.commit(table, array("I", tokens.tolist()), len(tokens))
        cache.release(table)
        return match.num_tokens

    def _explain(
        self, request: LoggedRequest, prompt: Prompt, hit: int, memory: Memory, group: Group
    ) -> None:
        if len(prompt.token_ids) - hit < self._config.min_lost_tokens:
            return
        relative = memory.relative(prompt.token_ids, hit)
        if relative is None or relative.lost_tokens < self._config.min_lost_tokens:
            return
        cause = find_cause(request, prompt, relative, self._prompts)
        place = relative.earlier.request.where
        for one in (group, self._total):
            key = cause.kind, cause.message
            finding = one.findings.setdefault(key, Finding(cause, request.where, place))
            finding.num_requests += 1
            finding.lost_tokens += cause.lost_tokens
            one.lost_tokens += cause.lost_tokens if IS_FAULT[cause.kind] else 0

    # ------------------------------------------------------------ groups

    def _group(self, name: str) -> Group:
        if name not in self._groups and len(self._groups) >= MAX_GROUPS:
            name = "(others)"
        return self._groups.setdefault(name, Group(name))

    def _name(self, request: LoggedRequest, prompt: Prompt) -> str:
        by = self._config.by
        if by == "template":
            return self._namer.name(request, prompt, self._prompts)
        if by in ("tenant", "session"):
            return str(getattr(request, by)) or f"(no {by})"
        return str(request.fields.get(by, f"(no {by})"))


class _TemplateNamer:
    """Finds templates by itself: prompts whose beginnings have much text in common, wherever in the
    beginning it stands. A short prompt is known by its first line, numbers left out."""

    def __init__(self) -> None:
        self._of_shingle: dict[int, str] = {}
        self._names: dict[str, int] = {}

    def name(self, request: LoggedRequest, prompt: Prompt, prompts: Prompts) -> str:
        hashes, _ = shingles(prompt.token_ids[:BEGINNING_TOKENS])
        votes: dict[str, int] = {}
        for h in hashes:
            if (known := self._of_shingle.get(h)) is not None:
                votes[known] = votes.get(known, 0) + 1
        best = max(votes, key=lambda name: votes[name], default="")
        if votes and votes[best] >= SAME_TEMPLATE * len(hashes):
            name = best
        else:
            name = self._fresh(_first_words(request, prompt, prompts), bool(hashes))
        for h in hashes:
            if len(self._of_shingle) < 1 << 22:
                self._of_shingle.setdefault(h, name)
        return name

    def _fresh(self, words: str, is_long: bool) -> str:
        count = self._names.get(words, 0) + 1
        self._names[words] = count
        return words if count == 1 or not is_long else f"{words} ({count})"


def _first_words(request: LoggedRequest, prompt: Prompt, prompts: Prompts) -> str:
    text = prompt.text or prompts.text_of(prompt.token_ids[:64])
    if request.messages:
        text = content_text(request.messages[0].get("content"))
    line = " ".join(text.split())
    return _CHANGING.sub("#", line)[:48] or "(empty)"


def explain(
    requests: Iterable[LoggedRequest],
    prompts: Prompts,
    config: ExplainConfig,
    broken: Broken | None = None,
) -> Report:
    """A log's report. ``broken`` is the one that ``read_log`` adds to, for prompts that cannot be
    written; ConfigError where none can."""
    explainer = Explainer(prompts, config)
    found = broken or Broken()
    for request in requests:
        try:
            explainer.add(request)
        except ConfigError as error:
            found.add(error)
    report = explainer.report()
    if found.first and not report.total.num_requests:
        raise ConfigError(found.first[0])
    return replace(report, num_broken=found.count, broken=tuple(found.first))
