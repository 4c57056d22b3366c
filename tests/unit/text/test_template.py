"""Templates render as transformers renders them, and cannot run away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from firstlight.base.errors import ModelFileError, RequestError
from firstlight.text import template as module
from firstlight.text.template import ChatTemplate, TemplateFault

CHATML = (
    "{% for message in messages %}\n"
    "    {%- if message.role == 'system' %}<|sys|>{{ message.content | trim }}\n"
    "    {%- else %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>{% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TEMPLATES = [
    CHATML,
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ messages | tojson }}",
    "{{ bos_token }}{% if tools is none %}no tools{% endif %}"
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% macro say(m) %}[{{ m.role }}: {{ m.content.split(' ') | join('_') }}]{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% endfor %}{{ '%s!' | format('x') }}{{ mood | default('calm') }}",
    "{% for m in messages %}{{ m.get('name', '-') }}{{ m.content[:3] | upper }}"
    "{{ {'ü': [1, 2]} | tojson(indent=2) }}"
    "{% endfor %}",
]
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()},
        optional={"name": st.text() | st.none()},
    ),
    min_size=1,
    max_size=4,
)


def render(source: str, messages: list[dict[str, object]], **options: bool) -> str:
    flags = {"add_generation_prompt": False, "continue_final_message": False, **options}
    return ChatTemplate(source, "test").render(messages, {"bos_token": "<s>"}, **flags)


@pytest.mark.parametrize("source", TEMPLATES)
@given(messages=MESSAGES, start=st.booleans())
def test_equal_to_transformers(source: str, messages: list[dict[str, object]], start: bool) -> None:
    without_null = [{k: v for k, v in message.items() if v is not None} for message in messages]
    (expected,), _ = render_jinja_template(
        [without_null], chat_template=source, add_generation_prompt=start, bos_token="<s>"
    )
    assert render(source, messages, add_generation_prompt=start) == expected


@given(messages=MESSAGES)
def test_continuing_the_last_message_is_equal_to_transformers(messages: list[dict[str, object]]) -> None:
    arguments = {"chat_template": CHATML, "continue_final_message": True, "bos_token": "<s>"}
    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    (expected,), _ = render_jinja_template([plain], **arguments)
    assert render(CHATML, plain, continue_final_message=True) == expected


def test_continuing_what_the_template_drops_is_refused() -> None:
    with pytest.raises(RequestError, match="changes the last message"):
        render(
            "{{ messages[0].role }} content", [{"role": "user", "content": "hi"}], continue_final_message=True
        )
    with pytest.raises(RequestError, match="needs a last message"):
        render("{{ content }}", [{"role": "user"}], continue_final_message=True)
    with pytest.raises(RequestError, match="does not render"):
        render("{{ 1 }}", [{"role": "user", "content": "hi"}], continue_final_message=True)


def test_what_a_template_refuses_is_the_clients_error() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}", [{"role": "user", "content": "hi"}])
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_what_breaks_within_a_template_is_the_servers_error() -> None:
    for source in ("{{ 1 + messages[0].content }}", "{{ messages[7].content }}", "{{ 1 // 0 }}"):
        with pytest.raises(TemplateFault, match="fault of the template, not of the request") as caught:
            render(source, [{"role": "user", "content": "hi"}])
        assert (caught.value.status, caught.value.kind, caught.value.param) == (500, "server_error", None)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{{ raise_exception('a system message is needed.') }}",
            "plain user message: a system message is needed.",
        ),
        ("{{ nothing() }}", "'nothing' is undefined."),
        ("{{ 1 + 'x' }}", "TypeError: "),
        ("{{ ''.__class__ }}{{ ''.__class__.x }}", "unsafe"),
    ],
)
def test_a_template_that_renders_no_plain_message_is_the_models_error(source: str, reason: str) -> None:
    with pytest.raises(ModelFileError, match=r"^test: ") as caught:
        ChatTemplate(source, "test").check({})
    assert reason in str(caught.value)
    assert not str(caught.value).endswith("..")
    assert "--chat-template" in caught.value.hint


def test_a_template_that_works_passes_the_check() -> None:
    for source in TEMPLATES:
        ChatTemplate(source, "test").check({"bos_token": "<s>"})


NESTED = "{% for i in [1] %}" * 40 + "{% endfor %}" * 40
DEEP = "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"


@pytest.mark.parametrize("source", ["{% for x in y %}", "{{ 1 +", "{% unknown %}", NESTED, DEEP])
def test_a_broken_template_is_the_models_error(source: str) -> None:
    with pytest.raises(ModelFileError, match="not valid Jinja"):
        ChatTemplate(source, "test")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ 'a' * 100000000 }}",
        "{{ [0] * 100000000 }}",
        "{{ 2 ** 100000000 }}",
        "{{ '%0100000000d' % 1 }}",
        "{{ '%*d' | format(100000000, 1) }}",
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{{ undefined_function() }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TemplateFault):
        render(source, [{"role": "user", "content": "hi"}])


def test_loops_and_output_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOOP_STEPS", 1000)
    message = [{"role": "user", "content": "hi"}]
    nested = "{% for i in range(100) %}{% for j in range(100) %}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="1000 loop steps"):
        render(nested, message)
    tree = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}"
    with pytest.raises(RequestError, match="1000 loop steps"):
        render(tree, message)
    monkeypatch.setattr(module, "MAX_OUTPUT_CHARS", 100)
    with pytest.raises(RequestError, match="100 characters"):
        render("{% for i in range(500) %}abc{% endfor %}", message)


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SECONDS", -1.0)
    with pytest.raises(RequestError, match="seconds"):
        render("{% for i in range(5000) %}{% endfor %}", [{"role": "user", "content": "hi"}])
