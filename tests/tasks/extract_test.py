"""Reading answers out of text."""

from decimal import Decimal

import pytest

from fp4rl_jax.tasks import _extract


@pytest.mark.parametrize(
    "text, number",
    [
        ("12", "12"),
        ("7 + 5 = 12.", "12"),
        ("The answer is 12!\n", "12"),
        ("**12**", "12"),
        ("\\boxed{12}", "12"),
        ("#### 12", "12"),
        ("$1,234.50", "1234.50"),
        ("1, 2", "2"),
        ("18th", "18"),
        (".5", "0.5"),
        ("...5", "5"),
        ("12...", "12"),
        ("1.2.3", "1.2"),
        ("-3", "-3"),
        ("it is -3.", "-3"),
        ("= \u22127", "-7"),
        ("(-4)", "-4"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("7-5", "5"),
        ("7 - 5", "5"),
        ("7 -5", "5"),
        ("(7)-5", "5"),
        ("step-3", "3"),
        ("2 = -  4", "4"),
        ("1e5", "1"),
    ],
)
def test_last_number(text, number):
    assert _extract.last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "x2", "-", ".", "\u0663", "a1b2"])
def test_no_number(text):
    assert _extract.last_number(text) is None


def test_numbers_of_any_length():
    assert _extract.last_number("9" * 6000) == Decimal("9" * 6000)


@pytest.mark.parametrize(
    "text, bare",
    [("12", True), (" -3\n", True), ("1,000.5", True), ("12.", False), ("= 12", False), ("", False)],
)
def test_bare_number(text, bare):
    assert _extract.is_bare_number(text) is bare


@pytest.mark.parametrize(
    "text, inside",
    [
        ("so \\boxed{12}", "12"),
        ("\\boxed{1} or \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{}", ""),
        ("\\boxed{12", None),
        ("12", None),
    ],
)
def test_last_boxed(text, inside):
    assert _extract.last_boxed(text) == inside


@pytest.mark.parametrize(
    "text, inside",
    [
        ("<answer> 7 </answer>", "7"),
        ("<answer>1</answer> no, <answer>2\n3</answer>", "2\n3"),
        ("<answer>7", None),
        ("7", None),
    ],
)
def test_last_tagged(text, inside):
    assert _extract.last_tagged(text, "answer") == inside
