"""Chat templates: jinja2 in a sandbox, with the names that published templates rely on.

The environment is the one that transformers documents for `apply_chat_template`: an immutable
sandbox, `trim_blocks` and `lstrip_blocks`, loop controls, a plain `tojson`, `raise_exception`,
`strftime_now`, and the `{% generation %}` block, whose body is rendered as it stands.
"""

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.parser import Parser

Message = Mapping[str, Any]
Ending = Literal["assistant", "none"]


class ChatTemplateError(ValueError):
    """A chat template that is missing, does not compile, or refuses its messages."""


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %} ... {% endgeneration %}` and renders what is inside it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja's own escapes for HTML


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@functools.cache
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(helpers)
    return environment.from_string(source)


def render(
    source: str,
    messages: Sequence[Message],
    *,
    ending: Ending = "assistant",
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Renders `messages` through the chat template `source`.

    Args:
        source: the jinja2 text of the template.
        messages: mappings with `role` and `content`, oldest first.
        ending: "assistant" opens the assistant's next turn (for a prompt to be completed),
            "none" stops after the last message.
        variables: further template variables (`bos_token`, `tools`, `enable_thinking`, ...).

    Returns:
        The text, special tokens spelt out.

    Raises:
        ChatTemplateError: the template does not compile, or refuses these messages; the
            template's own words are in the message.
    """
    values = {
        "tools": None,
        "documents": None,
        **(variables or {}),
        "messages": list(messages),
        "add_generation_prompt": ending == "assistant",
    }
    try:
        return _compile(source).render(**values)
    except jinja2.exceptions.TemplateError as error:
        raise ChatTemplateError(f"chat template: {type(error).__name__}: {error}") from error
