"""Every shell block of the pages is run by `make walk`, or says why not;
and what the walk makes of blocks.
"""

from contextlib import closing

import pytest

from tests.walk.__main__ import FailedError, Walk
from tests.walk.blocks import ROOT, PageError, blocks, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_walked_or_says_why_not(page):
    for block in blocks(page.name, page.read_text(encoding="utf-8")):
        assert block.text.strip()


def test_the_readme_is_walked_and_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert [block for block in blocks("README.md", text) if not block.skipped]


def test_comments_say_what_becomes_of_a_block():
    text = (
        "a\n<!-- walk: skip: needs TiDB -->\n```sh\nx\n```\n<!-- walk: beside until: ready "
        "-->\n```sh\ny\nz\n```\n"
        "```sh\nw\n```\n<!-- walk: after ending: y -->\n```sh\nv\n```\n"
    )
    assert [
        (each.line, each.text, each.skipped, each.until, each.ending) for each in blocks("p", text)
    ] == [
        (4, "x\n", "needs TiDB", "", ""),
        (8, "y\nz\n", "", "ready", ""),
        (12, "w\n", "", "", ""),
        (16, "v\n", "", "", "y"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "```\nmake run\n```\n",
        "<!-- walk: skip: it is long -->\n\n```sh\nx\n```\n",
        "<!-- walk: later -->\n```sh\nx\n```\n",
        "<!-- walk: skip: no shell -->\n```json\nx\n```\n",
    ],
)
def test_what_the_walk_would_not_see_is_refused(text):
    with pytest.raises(PageError):
        list(blocks("p", text))


@pytest.fixture
def walking(tmp_path):
    with closing(Walk(tmp_path, tmp_path)) as walk:
        yield walk


def paste(walk: Walk, text: str) -> None:
    for block in blocks("p", text):
        walk.paste(block)


def test_blocks_share_a_shell_that_has_nothing_else_in_its_environment(
    walking, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("LEAKED", "1")
    paste(walking, "```sh\nplace=$PWD\n```\n<!-- walk: skip: no -->\n```sh\nfalse\n```\n")
    paste(walking, '```sh\ntest "$place" = "$PWD" && test -z "$LEAKED"\n```\n')
    assert "left out: no" in capsys.readouterr().out
    with pytest.raises(FailedError, match="oh no"):
        paste(walking, "```sh\nfalse\necho oh no\ntrue\n```\n")


def test_what_goes_on_beside_others_ends_by_ctrl_c(walking, tmp_path):
    beside = "trap 'touch ended; exit 0' INT\necho ready\nsleep 60 & wait\n"
    paste(
        walking,
        f"<!-- walk: beside until: ready -->\n```sh\n{beside}```\n```sh\ntest ! -e ended\n```\n",
    )
    paste(walking, "<!-- walk: after ending: the sleep -->\n```sh\ntest -e ended\n```\n")
