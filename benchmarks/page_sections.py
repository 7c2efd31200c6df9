"""Sections of a page that benchmarks write and re-write: heading, text and one table."""


def with_section(text: str, heading: str, section: str) -> str:
    """`text` with the section of that heading replaced by `section`, or with it added at the end.

    What stands below the section's table, such as what somebody read out of it, is kept.
    """
    before, found, rest = text.partition(heading)
    if not found:
        return before.rstrip("\n") + "\n\n" + section
    own, heading_after, others = rest.partition("\n## ")
    _, _, below = own[own.rindex("\n| ---") + 1 :].partition("\n\n")
    kept = "\n" + below if below else ""
    return before + section + kept + heading_after + others
