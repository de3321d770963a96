"""The console's pages load nothing from elsewhere, and can run no text that they show."""

import re

import pytest

from server.console import console_pages, daemon_pages

PAGES = {f"{kind} {path}": answer for kind, pages in (("console", console_pages()), ("daemon", daemon_pages()))
         for path, answer in pages.items()}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_nothing_from_elsewhere_and_has_no_markup_from_strings(name):
    answer = PAGES[name]
    text = answer.body.decode()
    assert not re.search(r"(https?:)?//[a-z]", text.replace("// ", "")), "an address of elsewhere"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    policy = dict(answer.headers)["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy


@pytest.mark.parametrize("pages", [console_pages(), daemon_pages()])
def test_every_file_that_a_page_names_is_served_beside_it(pages):
    text = pages["/"].body.decode()
    assert "<script>" not in text
    assert " style=" not in text
    named = {f"/{each}" for each in re.findall(r'(?:src|href)="([a-z.]+\.(?:js|css))"', text)}
    assert named == set(pages) - {"/"}
