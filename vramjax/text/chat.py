"""Chat templates: a list of messages to the text of a prompt.

Templates come with checkpoints, so they are programs of strangers: they run in jinja2's immutable sandbox, with the
helpers that templates written for Hugging Face tokenizers expect. Knows nothing of tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vramjax.errors import TextError


class ChatTemplate:
    """One chat template, or several by name of which "default" is used ("tool_use", if any, when tools are given).

    Special tokens are passed by their role (`bos_token="<s>"`); one that is None is undefined in the template.

    Example: with the source "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}" and
    eos_token="</s>", `render([{"role": "user", "content": "Hi"}])` is "[user] Hi</s>".

    Raises:
      TextError: the source is not a template, or not one that jinja2 can parse.
    """

    def __init__(
        self,
        source: str | Mapping[str, str] | Sequence[Mapping[str, str]],
        *,
        now: Callable[[], datetime] = datetime.now,
        **special_tokens: str | None,
    ) -> None:
        self._sources = _named_sources(source)
        self._special_tokens = {role: text for role, text in special_tokens.items() if text is not None}
        self._environment = _environment(now)
        self._compiled: dict[str, jinja2.Template] = {}
        if "default" not in self._sources and len(self._sources) == 1:
            self._sources = {"default": next(iter(self._sources.values()))}
        if "default" not in self._sources:
            names = ", ".join(sorted(self._sources)) or "none"
            raise TextError(f"the chat templates are named {names}; expected one called default among them")
        self._template("default")

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[object] | None = None,
        most_characters: float = math.inf,
        **extra: object,
    ) -> str:
        """The prompt text for `messages`, ending where the assistant's answer begins (`add_generation_prompt`).

        Args:
          messages: mappings with at least a "role"; most templates also read "content".
          tools: descriptions of tools, as the template expects them.
          most_characters: of use to the caller; of a longer text only a beginning is made that is longer than that. (It
            is no bound on what a template does before, with variables of its own.)
          **extra: any other variable that the template reads, such as enable_thinking.

        Raises:
          TextError: `messages` is empty or malformed, or the template fails; then the template's own message is in it.
        """
        if isinstance(messages, str | bytes | Mapping) or not messages:
            raise TextError("messages is empty or not a list; expected a list of {'role': ..., 'content': ...}")
        for idx, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise TextError(f"message {idx} has no role; expected {{'role': ..., 'content': ...}}")
        template = self._template("tool_use" if tools and "tool_use" in self._sources else "default")
        variables = {
            **self._special_tokens,
            "documents": None,
            **extra,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        text, num_characters = [], 0
        try:
            for piece in template.generate(variables):
                text.append(piece)
                num_characters += len(piece)
                if num_characters > most_characters:
                    break
        except SecurityError as error:
            raise TextError(f"the chat template was stopped by the sandbox: {_one_line(error)}") from error
        except Exception as error:  # a template is a program: whatever it raises is a fault of the template
            raise TextError(f"the chat template failed: {_one_line(error)}") from error
        return "".join(text)

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            try:
                self._compiled[name] = self._environment.from_string(self._sources[name])
            except jinja2.TemplateSyntaxError as error:
                raise TextError(f"chat template, line {error.lineno}: {_one_line(error)}") from error
            except Exception as error:  # jinja2 makes Python of it, which has limits of its own
                raise TextError(f"the chat template cannot be parsed: {_one_line(error)}") from error
        return self._compiled[name]


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: object, attribute: str) -> jinja2.Undefined:
        # jinja2 would print such an attribute as "", and object only to using it.
        if attribute.startswith("_"):
            raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe")
        return super().unsafe_undefined(obj, attribute)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it as a plain set)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    # The settings are part of the template language that checkpoints are written in: other ones give other spaces.
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, >, & and ' for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _named_sources(source: object) -> dict[str, str]:
    named: dict[str, object]
    match source:
        case str():
            named = {"default": source}
        case Mapping():
            named = dict(source)
        case [*entries] if all(isinstance(e, Mapping) and isinstance(e.get("name"), str) for e in entries):
            named = {entry["name"]: entry.get("template") for entry in entries}
        case _:
            named = {"": source}
    texts = {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
    if len(texts) < len(named):
        raise TextError(
            f"the chat template is a {type(source).__name__}; expected a text, or templates by name "
            "({name: text} or [{'name': ..., 'template': ...}])"
        )
    return texts


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
