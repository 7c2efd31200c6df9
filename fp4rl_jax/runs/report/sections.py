"""Sections of a page that commands and benchmarks write and re-write: heading, text and one table."""

import re


def with_section(text: str, heading: str, section: str, *, note: str = "") -> str:
    """`text` with the section of that heading replaced by `section`, or with it added at the end.

    What stands below the section's table, such as what somebody read out of it, is kept.

    Args:
        text: the page.
        heading: of the section.
        section: what stands there instead, heading included.
        note: a paragraph that the writer may itself put right below its table; it is not kept.

    Raises:
        ValueError: the section that is there has no table, so it is not one that was written so.
    """
    line = re.search(rf"^{re.escape(heading)}$", text, re.MULTILINE)
    if line is None:
        return text.rstrip("\n") + "\n\n" + section
    own, heading_after, others = text[line.end() :].partition("\n## ")
    if "\n| ---" not in own:
        raise ValueError(f"section {heading!r} is there and has no table, expected one that was written so")
    _, _, below = own[own.rindex("\n| ---") + 1 :].partition("\n\n")
    if note:
        below = below.removeprefix(note).lstrip("\n")
    kept = "\n" + below if below else ""
    return text[: line.start()] + section + kept + heading_after + others
