"""Bugs that are planted into a capture, to see the fuzzer find them: `python -m
tests.fuzz.mysql.plants NAME …`.

The rest of the command line is the daemon's. Nothing of the product knows of this.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

from tests.integration.capture import processes


def harmless() -> None:
    """TRUNCATE counts as a statement that changes nothing."""
    from server.puller.mysql.ddl.statement import Kind, Statement, Verb, statement_of
    from server.puller.mysql.transaction import transactions

    def read(*arguments: Any) -> Statement:
        statement = statement_of(*arguments)
        is_planted = any(action.verb is Verb.TRUNCATED for action in statement.actions)
        return Statement(Kind.NOTHING) if is_planted else statement

    mock.patch.object(transactions, "statement_of", read).start()


def rename() -> None:
    """A column that is renamed counts as dropped and added."""
    from server.puller.mysql import tables
    from server.puller.mysql.ddl.tracker import Tracked, altered

    def planted(table: Any, tree: Any, context: Any) -> Tracked:
        from dataclasses import replace

        tracked = altered(table, tree, context)
        names = {column.id: column.name.lower() for column in table.columns}
        free = tracked.table.free_column_id
        columns = []
        for column in tracked.table.columns:
            if names.get(column.id, column.name.lower()) != column.name.lower():
                column, free = replace(column, id=free), free + 1  # noqa: PLW2901
            columns.append(column)
        return replace(
            tracked, table=replace(tracked.table, columns=tuple(columns), next_column_id=free)
        )

    mock.patch.object(tables, "altered", planted).start()


def savepoint() -> None:
    """ROLLBACK TO SAVEPOINT counts as a statement that changes nothing."""
    from server.puller.mysql.ddl.statement import Kind, Statement, statement_of
    from server.puller.mysql.transaction import transactions

    def read(query: Any, dialect: Any) -> Statement:
        statement = statement_of(query, dialect)
        return Statement(Kind.NOTHING) if statement.kind is Kind.ROLLBACK_TO else statement

    mock.patch.object(transactions, "statement_of", read).start()


PLANTS: Final[dict[str, Callable[[], None]]] = {
    "harmless": harmless,
    "rename": rename,
    "savepoint": savepoint,
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Daemons that are started in the block have the bug."""
    if not name:
        yield
        return
    with mock.patch.object(
        processes, "COMMAND", [sys.executable, "-m", "tests.fuzz.mysql.plants", name]
    ):
        yield


def main() -> None:
    """Plant, then be the daemon."""
    PLANTS[sys.argv[1]]()
    del sys.argv[1]
    from server.cli.main import main as daemon

    sys.exit(daemon())


if __name__ == "__main__":
    main()
