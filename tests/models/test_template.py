"""Chat templates: what they are given, what they may not do, and how they fail."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pagemill.core.errors import MissingExtraError, ModelError, RequestError
from pagemill.models import template
from pagemill.models.template import ChatTemplate

CHAT = [
    {"role": "user", "content": "<b>Hi</b> & 'you' 🙂"},
    {"role": "assistant", "content": "Yes"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "int"}}}}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, **settings: Any) -> str:
    return ChatTemplate(source, SPECIAL).render(CHAT, **settings)


LIKE_OTHERS = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ messages | tojson(sort_keys=true) }}",
    "{{ tools | tojson(true) }} {{ messages | tojson(separators=(',', ':')) }}",
    "  {% if add_generation_prompt %}\n  go\n  {% endif %}\n",
    "{% set a = namespace(n=0) %}{% for m in messages %}{% set a.n = a.n + 1 %}{% endfor %}"
    "{{ a.n }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[0].role) ~ '-' * 3 ~ 2 ** 10 }}",
    "{{ messages[0].content.split('>')[1].upper() }}{{ undefined_thing }}{{ messages | length }}",
    "{{ strftime_now('%Y') | length }}{{ range(3) | list }}{{ dict(a=1).a }}",
)


@pytest.mark.parametrize("source", LIKE_OTHERS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_templates_render_as_in_transformers(source: str, add_generation_prompt: bool) -> None:
    expected, _ = render_jinja_template(
        [CHAT], TOOLS, chat_template=source, add_generation_prompt=add_generation_prompt, **SPECIAL
    )
    found = render(source, tools=TOOLS, add_generation_prompt=add_generation_prompt)
    assert found == expected[0]


def test_tools_are_passed_through_unchanged() -> None:
    assert json.loads(render("{{ tools | tojson }}", tools=TOOLS)) == TOOLS
    assert render("{{ tools is none }}") == "True"
    assert render("{{ tools is none }}", tools=[]) == "True"


def test_variables_reach_the_template_but_replace_nothing() -> None:
    source = "{{ thinking }} {{ messages | length }} {{ bos_token }}"
    given = {"thinking": "on", "messages": [], "bos_token": "<other>"}
    assert render(source, variables=given) == "on 2 <other>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ (messages | attr('__class__')) | attr('__base__') | string | length > 0 or 1 / 0 }}",
        "{% set x = messages.append(1) %}",
        "{% set x = messages[0].update({'role': 'x'}) %}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    """Either the template is refused, or it sees nothing."""
    before = json.dumps(CHAT)
    try:
        assert render(source).strip() in ("", "True")
    except RequestError:
        pass
    assert json.dumps(CHAT) == before


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses.*: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses"),
        ("{{ messages[9].content.x }}", "refuses"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "too big"),
        ("{{ 'x' * (10 ** 12) }}", r"too large at '\*'"),
        ("{{ [1] * 10 ** 9 }}", r"too large at '\*'"),
        ("{{ 10 ** 1000000000 }}", r"too large at '\*\*'"),
        ("{% include 'other' %}", "refuses"),
    ],
)
def test_what_goes_wrong_is_a_request_error(source: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_output_is_bounded_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_PROMPT_CHARACTERS", 10_000)
    source = (
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    )
    with pytest.raises(RequestError, match="over 10000 characters"):
        render(source)
    doubling = (
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}"
    )
    with pytest.raises(RequestError, match="too large at"):
        render(doubling + "{% endfor %}")


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ a", "{% for x in y %}", "{% nonsense %}", "{{ a | nofilter }}"]
)
def test_a_template_with_an_error_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError, match=r"error in line 1.*--chat-template"):
        ChatTemplate(source, {})


def test_a_deeply_nested_template_is_refused() -> None:
    with pytest.raises((ModelError, RequestError)):
        ChatTemplate("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", {}).render([])


def test_without_jinja_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[engine\]'"):
        ChatTemplate("x", {})


def test_one_template_serves_many_threads() -> None:
    compiled = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})

    def ask(number: int) -> str:
        return compiled.render([{"content": str(number)}] * 50)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(64))) == [str(i) * 50 for i in range(64)]
