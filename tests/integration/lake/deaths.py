"""Deaths of a lake job in this process, one after each thing that it makes durable:
no step may be left out by name.

What is durable is made by a few calls: of the JVM by Py4J, of a database by its driver, of the file
system by pathlib and shutil. Each of them is followed by a death once for each place in the package
that makes it.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg
import pymysql
from py4j.java_gateway import JavaMember

_JAVA = {"sql", "save", "write", "commit", "commitTransaction", "createTable", "rename", "delete"}
"""Methods of Java objects that make something durable; `sql` is also asked for what only looks."""
_LOOKS = ("SELECT", "DESCRIBE", "SHOW")
_STATEMENTS = ("ALTER", "CREATE", "DROP", "RENAME")
"""Those that MySQL commits by themselves."""


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


class Deaths:
    """While `armed`, kills after each durable step that nobody has died at yet."""

    def __init__(self) -> None:
        self.armed = False
        self.places: set[tuple[Any, ...]] = set()

    def after(self, what: str) -> None:
        """Something is durable now."""
        if not self.armed:
            return
        place = (what, *_callers())
        if place not in self.places:
            self.places.add(place)
            self.armed = (
                False  # the dead do nothing: what is cleaned up while this is raised must not count
            )
            raise Killed

    @contextmanager
    def planned(self) -> Iterator[None]:
        """Be in the way of all durable steps, for the block."""
        wrapped: list[tuple[Any, str, Callable[..., str | None]]] = [
            (JavaMember, "__call__", _java),
            (psycopg.Connection, "commit", _commit),
            (pymysql.connections.Connection, "commit", lambda *_: "commit"),
            (pymysql.cursors.Cursor, "execute", _statement),
            (Path, "rename", lambda *_: "rename"),
            (os, "link", lambda *_: "link"),
            (shutil, "rmtree", lambda *_: "rmtree"),
        ]
        with ExitStack() as patched:
            for owner, name, told in wrapped:
                patched.enter_context(patch.object(owner, name, self._around(owner, name, told)))
            yield

    def _around(self, owner: Any, name: str, told: Callable[..., str | None]) -> Any:
        called = getattr(owner, name)

        def around(*arguments: Any, **named: Any) -> Any:
            result = called(*arguments, **named)
            what = told(*arguments)
            if what is not None:
                self.after(what)
            return result

        return around


def _java(member: Any, *arguments: Any) -> str | None:
    if member.name not in _JAVA:
        return None
    text = next((argument for argument in arguments if isinstance(argument, str)), "")
    if member.name == "sql" and text.lstrip().upper().startswith(_LOOKS):
        return None
    return f"{member.name} {text}" if member.name == "sql" else str(member.name)


def _commit(*_: Any) -> str | None:
    """None for settings of a new connection, which nobody has to close yet."""
    return None if sys._getframe(2).f_code.co_name == "connect" else "commit"


def _statement(cursor: Any, query: str, *_: Any) -> str | None:
    return query if query.lstrip().upper().startswith(_STATEMENTS) else None


def _callers() -> Iterator[str]:
    """The lines of the package that lead here, from the innermost out."""
    frame = sys._getframe(2)
    while frame is not None:
        if "pyspark_tidemark" in frame.f_code.co_filename:
            yield f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
