"""The template environment: what published templates may use, and what the sandbox refuses."""

import dataclasses
import datetime

import pytest

from fp4rl_jax import text
from fp4rl_jax.text import chat

MESSAGES = [{"role": "user", "content": "a < b & 'é'"}]


def test_blocks_are_trimmed_and_loop_controls_work() -> None:
    source = (
        "{% for i in range(9) %}\n  {% if i == 3 %}{% break %}{% endif %}\n{{ i }},\n{% endfor %}\n"
        "{{ add_generation_prompt }}"
    )
    assert chat.render(source, MESSAGES) == "0,\n1,\n2,\nTrue"


def test_generation_blocks_render_their_body() -> None:
    source = "{% for m in messages %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endfor %}"
    assert chat.render(source, MESSAGES) == "[a < b & 'é']"


def test_tojson_is_plain_json() -> None:
    assert chat.render("{{ messages | tojson }}", MESSAGES) == (
        '[{"role": "user", "content": "a < b & \'é\'"}]'
    )


def test_variables_reach_the_template() -> None:
    source = "{{ bos_token }}{{ tools is none }}{{ documents is none }}{{ enable_thinking }}"
    variables = {"bos_token": "<s>", "enable_thinking": False}
    assert chat.render(source, MESSAGES, variables=variables) == "<s>TrueTrueFalse"


def test_strftime_now_gives_the_date() -> None:
    assert chat.render("{{ strftime_now('%Y') }}", MESSAGES) == str(datetime.date.today().year)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "SecurityError"),
    ],
)
def test_a_template_that_fails_or_escapes_is_one_error(source: str, message: str) -> None:
    with pytest.raises(text.ChatTemplateError, match=message):
        chat.render(source, MESSAGES)


def test_a_tokenizer_without_a_template_says_so() -> None:
    tokenizer = dataclasses.replace(text.byte_tokenizer(), chat_template=None)
    with pytest.raises(text.ChatTemplateError, match="no chat template"):
        tokenizer.render_chat(MESSAGES)
