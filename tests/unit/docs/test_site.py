"""The site's menu and the links between pages, without building it; and the URIs' page."""

import re

import pytest
from pyspark_tidemark.lake.kafka import settings as kafka
from pyspark_tidemark.lake.registry import FORMATS
from pyspark_tidemark.sink_uri import _DATABASE_OPTIONS, READERS, SYSTEMS

from server.changefeed.source import KINDS
from server.puller.mysql.session import options
from tests.walk.blocks import ROOT, pages

LINK = re.compile(r"\]\((?!https?:)(?P<target>[^)\s#]*)(?:#(?P<anchor>[^)\s]+))?\)")
MENU = re.compile(r"^ +- (?:[^:\n]+: )?(\S+\.md)$|^ +- [^:\n]+: (\w+)$", re.M)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page) -> None:
    for link in LINK.finditer(page.read_text(encoding="utf-8")):
        target = (page.parent / link["target"]).resolve() if link["target"] else page
        assert target.exists(), link[0]
        if link["anchor"]:
            assert link["anchor"] in anchors(target.read_text(encoding="utf-8")), link[0]


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_menu_has_every_page_of_docs() -> None:
    text = (ROOT / "deploy/site/mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    listed = {page or folder for page, folder in MENU.findall(text)}
    of_docs = {str(page.relative_to(ROOT / "docs")) for page in pages() if "docs" in page.parts}
    assert {name for name in listed if not name.startswith(("index.", "project/"))} >= {
        name for name in of_docs if not name.startswith(("design/", "format/"))
    }


def test_the_page_of_uris_has_all_schemes_and_options() -> None:
    text = (ROOT / "docs/reference/uris.md").read_text(encoding="utf-8")
    schemes = [*KINDS, *FORMATS, *READERS]
    assert not [scheme for scheme in schemes if scheme and f"`{scheme}://" not in text]
    assert not [system for system in SYSTEMS if f"+{system}://" not in text]
    known = (*options._OPTIONS, *_DATABASE_OPTIONS, *kafka.OPTIONS)
    assert not [option for option in known if f"`{option}`" not in text]
