"""The documentation: every page is in the index, every link leads somewhere, no address is recorded."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").glob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    named = {(ROOT / "docs" / link).resolve() for link in LINK.findall(index)}
    missing = [page.name for page in PAGES if page.resolve() not in named and page.name != "README.md"]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    broken = [link for link in links if not (page.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("name", ["requirements.lock", "tasks.lock", "pyproject.toml", "Makefile"])
def test_no_download_address_is_recorded(name: str) -> None:
    assert "://" not in (ROOT / name).read_text(encoding="utf-8")
