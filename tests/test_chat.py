"""Chat templates as checkpoints write them, and ones that fail or attack."""

from __future__ import annotations

from datetime import datetime

import pytest

from vramjax.errors import TextError
from vramjax.text.chat import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _render(source: str, **extra) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(USER, **extra)


def test_chatml():
    template = ChatTemplate(CHATML)
    talk = [*USER, {"role": "assistant", "content": "Hello"}]
    assert template.render(USER) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(talk, add_generation_prompt=False) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # Lines that hold only a block leave no trace: trim_blocks and lstrip_blocks.
        ("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n.", "Hi\n."),
        ("a  {%- if true %}  b{% endif %}", "a  b"),
        ("{{ bos_token }}{{ eos_token }}{{ unk_token }}", "<s></s>"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ {'b': '<é & \"x\">', 'a': [1, none, true]} | tojson }}", '{"b": "<é & \\"x\\">", "a": [1, null, true]}'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, sort_keys=true) }}", '{"a": "\\u00e9", "b": 1}'),
        ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ '<b>' }}", "<b>"),
        ("{% generation %}\n{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        ("{{ tools is none }}{{ documents is none }}{{ nothing is defined }}", "TrueTrueFalse"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[0].role) }}", "[user]"),
        ("{{ messages[0].content.strip().upper() }}{{ messages[-1]['missing'] }}", "HI"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_language_of_templates(source: str, expected: str):
    assert _render(source) == expected


def test_strftime_now():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2025, 7, 4))
    assert template.render(USER) == "04 Jul 2025"
    assert _render("{{ strftime_now('%Y') }}") >= "2025"


def test_extra_variables_and_tools():
    source = "{{ enable_thinking }}{% for tool in tools or [] %}{{ tool.name }}{% endfor %}"
    assert _render(source, enable_thinking=False, tools=[{"name": "f"}]) == "Falsef"


@pytest.mark.parametrize(
    "source",
    [
        {"default": "D", "tool_use": "T"},
        [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
    ],
)
def test_named_templates(source):
    template = ChatTemplate(source)
    assert template.render(USER) == "D"
    assert template.render(USER, tools=[{"name": "f"}]) == "T"


def test_one_named_template_is_the_default():
    assert ChatTemplate({"chat": "C"}).render(USER) == "C"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"a": "A", "b": "B"}, "named a, b; expected one called default"),
        ({}, "named none"),
        ([], "named none"),
        (["text"], "is a list; expected a text"),
        ([{"name": "default"}], "is a list; expected a text"),
        ([{"name": ["default"], "template": "D"}], "is a list; expected a text"),
        ({"default": 3}, "is a dict; expected a text"),
        (3, "is a int; expected a text"),
        ("{% if x %}", "chat template, line 1"),
        ("\n\n{{ x }", "chat template, line 3"),
        ("{{ x | nofilter }}", "line 1: No filter named 'nofilter'"),
        ("{% generation %}", "chat template, line 1"),
        ("{% nosuchtag %}", "unknown tag 'nosuchtag'"),
        ("{% break %}", "the chat template cannot be parsed: 'break' outside loop"),
        ("{% for x in [1] %}" * 30 + "{% endfor %}" * 30, "the chat template cannot be parsed: too many"),
        ("{{ 10 ** 5000 }}", "the chat template cannot be parsed: "),
        ("{{ dict(a=1, a=2) }}", "the chat template cannot be parsed: "),
    ],
)
def test_what_is_no_template(source, message: str):
    with pytest.raises(TextError, match=message) as info:
        ChatTemplate(source)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must\nalternate!') }}", "the chat template failed: Roles must alternate!"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 3 }}", "the chat template failed: "),
        ("{{ nothing | tojson }}", "not JSON serializable"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% include 'other' %}", "the chat template failed"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(1000000000) %}{{ i }}{% endfor %}", "Range too big"),
        ("{{ strftime_now(3) }}", "the chat template failed"),
    ],
)
def test_a_failing_template_is_one_line(source: str, message: str):
    with pytest.raises(TextError, match=message) as info:
        _render(source)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__closure__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages.clear() }}",
    ],
)
def test_the_sandbox_holds(source: str):
    messages = [dict(USER[0])]
    with pytest.raises(TextError, match="stopped by the sandbox: ") as info:
        ChatTemplate(source).render(messages)
    assert "\n" not in str(info.value)
    assert messages == USER


def test_no_more_is_made_than_is_of_use():
    template = ChatTemplate(
        "{% for i in range(100000) %}{% for j in range(100000) %}1234567890{% endfor %}{% endfor %}"
    )
    assert template.render(USER, most_characters=1000) == "1234567890" * 101
    assert ChatTemplate("123").render(USER, most_characters=3) == "123"


@pytest.mark.parametrize("messages", [[], None, "Hi", {"role": "user"}, ["Hi"], [{"content": "Hi"}], [USER]])
def test_messages_are_checked(messages):
    with pytest.raises(TextError, match="expected "):
        ChatTemplate(CHATML).render(messages)
