"""The web console: static files as answers; `server.capture.console` has what they show.

They load nothing from elsewhere, and a page may run only the script that comes with it
(`Content-Security-Policy`), so text of a database that is shown can never become code.
"""

from collections.abc import Mapping
from importlib.resources import files
from typing import Final

from server.routes import Answer

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
)


def console_pages() -> Mapping[str, Answer]:
    """The console of the changefeeds, by path; `/console.json` has to be answered beside it."""
    return _pages("console")


def daemon_pages() -> Mapping[str, Answer]:
    """The page of a daemon's HTTP port, by path: it shows that port's `/metrics`."""
    return _pages("daemon")


def _pages(page: str) -> dict[str, Answer]:
    static = files(__package__) / "static"
    document, *loaded = f"{page}.html", "console.css", "page.js", f"{page}.js"
    paths = {"/": document} | {f"/{name}": name for name in loaded}
    return {
        path: Answer(200, (static / name).read_bytes(), _TYPES[name.rpartition(".")[2]], _HEADERS)
        for path, name in paths.items()
    }
