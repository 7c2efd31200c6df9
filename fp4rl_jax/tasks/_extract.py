"""Reading an answer out of free text."""

import re
from decimal import Decimal

# 1,234.5 or 12.5 or .5, not inside a word ("x2", "1e5" ends at 1) nor after a decimal ("1.2.3").
# ASCII digits only, and Decimal rather than int: Python refuses to parse an int of 5000 digits.
_NUMBER = re.compile(
    r"(?<![\w.])\.[0-9]+"
    r"|(?<![A-Za-z_0-9])(?<![0-9]\.)(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
)
# A minus sign just before the number is its sign unless an operand stands before it: "7-5" and
# "7 -5" end in 5, "is -5" and "(-5)" in -5. A currency sign may stand between the two.
_SIGN = re.compile(r"(?<![\w)\]}])(?<![0-9)\]}]\s)-\$?$")


def last_number(text: str) -> Decimal | None:
    """The last number written in `text`, or None if there is none."""
    text = text.replace("\u2212", "-")
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    found = numbers[-1]
    value = Decimal(found.group().replace(",", ""))
    return -value if _SIGN.search(text, 0, found.start()) else value


def is_bare_number(text: str) -> bool:
    """Whether `text` is one number and nothing else, white space apart."""
    text = text.strip().replace("\u2212", "-").removeprefix("-")
    return _NUMBER.fullmatch(text) is not None


def last_tagged(text: str, tag: str) -> str | None:
    """What stands in the last `<tag>...</tag>` of `text`, stripped, or None."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    return found[-1].strip() if found else None


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` of `text`, braces balanced, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin + 1 : position].strip()
    return None
