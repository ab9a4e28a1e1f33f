"""explain: every kind of fault on a small log, what is no fault, and a cut of a real log."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pagemill.bench.explain import ExplainConfig, Finding, Report, explain
from pagemill.bench.explain_read import LoggedRequest, read_log
from pagemill.bench.explain_report import as_json
from pagemill.bench.explain_tokens import PlainTokenizer, Prompts, load_prompts
from pagemill.models.template import ChatTemplate

DATA = Path(__file__).parents[1] / "data"
WORDS = "mill water stone wheel grain river bridge the a of and turns slowly under old".split()


def text_of(num_words: int, seed: int = 0) -> str:
    stream = random.Random(seed)
    return " ".join(stream.choice(WORDS) + chr(97 + stream.randrange(26)) for _ in range(num_words))


STABLE = text_of(600)


def chat(*contents: str, t: float | None = None, **more: Any) -> LoggedRequest:
    """System, user, assistant, user ... in turn."""
    roles = ["system", *(("user", "assistant") * len(contents))]
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=False))
    return LoggedRequest("log:1", time_s=t, messages=messages, **more)


def plain_prompts(template: str | None = None) -> Prompts:
    return Prompts(PlainTokenizer(), ChatTemplate(template, {}) if template else None, "plain")


def run(requests: Iterable[LoggedRequest], template: str | None = None, **config: Any) -> Report:
    return explain(requests, plain_prompts(template), ExplainConfig(**config))


def only(report: Report) -> Finding:
    (finding,) = report.total.findings.values()
    return finding


# ---------------------------------------------------------------- faults


def test_volatile_first_line(smollm2: Path) -> None:
    """Five changing characters in front of 16,000 equal tokens, as a coding agent sent them."""
    prompts = load_prompts(str(smollm2), None)
    stable = text_of(9000)
    assert len(prompts.coder.encode(stable)) > 16_000
    seen = ("a1b2c", "9f3e0", "77d1a")
    requests = [
        chat(f"header: version=2.1.42; cch={value};\n{stable}", f"Question {i}?", t=30.0 * i)
        for i, value in enumerate(seen)
    ]
    report = explain(requests, prompts, ExplainConfig())
    finding = only(report)
    cause = finding.example
    assert (cause.kind, cause.message) == ("volatile", 0)
    assert cause.what == "an id that changes"
    assert cause.before.endswith("cch=") and cause.token_text == "9"
    assert cause.was.startswith("a1b2c") and cause.now.startswith("9f3e0")
    assert "behind the stable part" in cause.advice
    assert finding.num_requests == 2
    assert finding.lost_tokens > 32_000
    assert (
        report.minutes == 1.0 and report.per_minute(report.total.lost_tokens) == finding.lost_tokens
    )
    assert report.total.hit_rate < 0.01


THINKING = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}[assistant]"
)
KEEPING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"


def history() -> list[LoggedRequest]:
    answer = f"<think>{text_of(80, 1)}</think>{text_of(300, 2)}"
    first = chat("Be brief.", text_of(100, 3), answer)
    return [first, chat("Be brief.", text_of(100, 3), answer, "And then?")]


def test_template_that_rewrites_history() -> None:
    """An old answer loses its thoughts: everything behind it is computed again."""
    cause = only(run(history(), THINKING)).example
    assert (cause.kind, cause.message) == ("template", 2)
    assert cause.was.startswith("<think>") and cause.before.endswith("[assistant]")
    assert cause.lost_tokens > 300
    assert run(history(), KEEPING).total.lost_tokens == 0, "the template is what made it"


def tool(name: str, *, is_turned: bool = False) -> dict[str, Any]:
    words = {"description": text_of(60, len(name)), "name": name}
    inner = dict(reversed(words.items())) if is_turned else words
    return {"type": "function", "function": inner}


def test_tools_in_another_order() -> None:
    tools = tuple(tool(name) for name in ("read", "write_file", "run"))
    requests = [chat(STABLE, "Hi", tools=tools), chat(STABLE, "Hi", tools=tools[::-1])]
    assert only(run(requests)).example.kind == "tools"


TOOLS_LAST = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}[assistant]"
)


@pytest.mark.parametrize(
    ("template", "also"), [(TOOLS_LAST, "tools in another order"), (KEEPING, "")]
)
def test_the_first_difference_is_the_cause_though_tools_turn_too(template: str, also: str) -> None:
    tools = tuple(tool(name) for name in ("read", "write_file", "run"))
    requests = [
        chat(f"Now 1{i}:31. {STABLE}", "Hi", tools=tools[:: 1 - 2 * (i % 2)]) for i in range(4)
    ]
    cause = only(run(requests, template)).example
    assert (cause.kind, cause.message, cause.also) == ("volatile", 0, also)
    assert cause.was.startswith("0:31") and "behind the stable part" in cause.advice
    assert only(run(requests)).example.kind == "tools", "plain form: tools stand in front"


def test_turned_keys_behind_a_clock_are_not_the_cause() -> None:
    facts = {f"key{chr(97 + i)}": text_of(3, i) for i in range(3)}
    contents = json.dumps(facts), json.dumps(dict(reversed(facts.items())))
    stamped = "{% for m in messages %}{{ m.at }} " + STABLE + "{{ m.content }}\n{% endfor %}"
    requests = [
        LoggedRequest("log:1", messages=({"role": "user", "content": content, "at": f"1{i}:00"},))
        for i, content in enumerate(contents)
    ]
    assert only(run(requests, stamped)).example.kind == "volatile"


def test_keys_in_another_order() -> None:
    turned = tool("read", is_turned=True)
    requests = [chat(STABLE, "Hi", tools=(tool("read"),)), chat(STABLE, "Hi", tools=(turned,))]
    assert only(run(requests)).example.kind == "keys"
    facts = {f"key{chr(97 + i)}": text_of(3, i) for i in range(20)}
    contents = [json.dumps(facts), json.dumps(dict(reversed(facts.items())))]
    finding = only(run(chat(content, STABLE) for content in contents))
    assert (finding.example.kind, finding.example.message) == ("keys", 0)


@pytest.mark.parametrize(
    ("was", "now", "kind"),
    [
        ("Be  kind.\n", "Be kind.\n", "whitespace"),
        ("Be kind.\r\n\r\n", "Be kind.\n", "whitespace"),
        ("apples, pears, plums, figs\n", "figs, plums, pears, apples\n", "order"),
        ("It is 2026-11-30 12:31.\n", "It is 2026-12-01 09:02.\n", "volatile"),
        ("", "Remember to be brief.\n", "inserted"),
        ("First we spoke of the weather at length.\n", "", "removed"),
    ],
)
def test_a_small_difference_in_front(was: str, now: str, kind: str) -> None:
    requests = [
        LoggedRequest(f"log:{i}", text=f"You help.\n{x}{STABLE}") for i, x in enumerate((was, now))
    ]
    report = run(requests)
    finding = only(report)
    assert finding.example.kind == kind
    assert 600 <= report.total.lost_tokens <= 1300
    assert (finding.where, finding.earlier_where) == ("log:1", "log:0")
    total = report.total
    assert total.hit_tokens + total.new_tokens + total.lost_tokens == total.prompt_tokens


# ---------------------------------------------------------------- no faults


def test_turns_that_grow_are_no_fault() -> None:
    contents = [STABLE]
    requests = []
    for turn in range(5):
        contents.append(text_of(90, 10 + turn))
        requests.append(chat(*contents))
        contents.append(text_of(90, 50 + turn))
    report = run(requests)
    assert not report.total.findings
    assert report.total.hit_rate > 0.5


def test_a_prompt_that_repeats_its_own_text_is_no_fault() -> None:
    """An agent reads the same file again."""
    file = text_of(200, 5)
    first = chat(STABLE, file)
    again = chat(STABLE, file, "I read it.", file)
    report = run([first, again])
    assert report.total.lost_tokens == 0
    assert only(report).example.kind == "repeated"


def test_other_questions_under_one_system_prompt_are_no_fault() -> None:
    report = run(chat(STABLE, text_of(100, 20 + i)) for i in range(6))
    assert not report.total.findings and report.total.hit_rate > 0.6


def test_an_equal_prompt_misses_its_last_token_only() -> None:
    report = run([chat(STABLE, "Hi")] * 2)
    total = report.total
    assert total.hit_tokens == total.prompt_tokens // 2 - 1


# ---------------------------------------------------------------- groups


def test_templates_are_found_by_themselves() -> None:
    """By what their beginnings share, though the first line changes."""

    def ask(seed: int, i: int) -> LoggedRequest:
        return LoggedRequest("log", text=f"Session {i * 7919}.\n{text_of(300, seed)}\nQuestion {i}")

    requests = [ask(seed, i) for i in range(6) for seed in (100, 200)]
    report = run(requests)
    assert sorted(group.num_requests for group in report.groups) == [6, 6]
    assert len({group.name for group in report.groups}) == 2
    assert all(group.lost_tokens > 0 for group in report.groups)


@pytest.mark.parametrize("by", ["tenant", "session", "team"])
def test_groups_by_a_field(by: str) -> None:
    requests = [
        LoggedRequest(
            "log",
            text=STABLE,
            tenant=f"x{i % 2}",
            session=f"x{i % 2}",
            fields={"team": f"x{i % 2}"},
        )
        for i in range(4)
    ]
    report = run(requests, by=by)
    assert {group.name: group.num_requests for group in report.groups} == {"x0": 2, "x1": 2}


def test_isolated_tenants_share_nothing() -> None:
    requests = [LoggedRequest("log", text=STABLE, tenant=tenant) for tenant in "aab"]
    assert (
        run(requests).total.hit_tokens == 2 * run(requests, is_isolated=True).total.hit_tokens > 0
    )


def test_a_small_cache_forgets() -> None:
    requests = [LoggedRequest("log", text=text_of(400, i % 3)) for i in range(9)]
    assert run(requests).total.hit_rate > 0.6
    assert run(requests, cache_tokens=1600).total.hit_rate < 0.05


# ---------------------------------------------------------------- a real log


def test_a_cut_of_a_real_agent_log() -> None:
    """Each prompt starts with the one before: counts by the plain tokenizer, which never change."""
    report = run(read_log(DATA / "agent_text_miniswe_cut.jsonl"), by="session")
    total = report.total
    assert (total.num_requests, len(report.groups)) == (12, 3)
    assert total.lost_tokens == 0
    requests = list(read_log(DATA / "agent_text_miniswe_cut.jsonl"))
    coder = PlainTokenizer()
    prompts = [coder.encode(request.text) for request in requests]
    hits = 0
    for i, prompt in enumerate(prompts):
        cached = [p + coder.encode(r.output) for p, r in zip(prompts[:i], requests, strict=False)]
        hits += max([min(common(prompt, other), len(prompt) - 1) for other in cached], default=0)
    assert (total.prompt_tokens, total.hit_tokens) == (sum(map(len, prompts)), hits)


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_the_report_is_json() -> None:
    written = json.loads(json.dumps(as_json(run(history(), THINKING))))
    (finding,) = written["total"]["findings"]
    assert finding["kind"] == "template" and finding["message"] == 2 and finding["is_fault"]
    assert written["minutes"] is None and finding["lost_tokens_per_minute"] is None
