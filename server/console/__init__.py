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
    return _pages({"/": "console.html", "/console.css": "console.css", "/console.js": "console.js"})


def daemon_pages() -> Mapping[str, Answer]:
    """The page of a daemon's HTTP port, by path: it shows that port's `/metrics`."""
    return _pages({"/": "daemon.html", "/console.css": "console.css", "/daemon.js": "daemon.js"})


def _pages(names: Mapping[str, str]) -> dict[str, Answer]:
    static = files(__package__) / "static"
    return {
        path: Answer(200, (static / name).read_bytes(), _TYPES[name.rpartition(".")[2]], _HEADERS)
        for path, name in names.items()
    }
