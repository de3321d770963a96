"""Foreign keys that change rows of their own table: what they do is in no event of the log (MYSQL.md §6c).

A table that has one cannot be replicated: the target would keep its rows as they were.
"""

import itertools

from server.puller.mysql.ddl import tokens_of


def cascade_fault(foreign_key: str) -> str:
    """Why a table with that foreign key cannot be replicated, and what to do."""
    return (
        f"its rows change by the foreign key {foreign_key}, which the log does not have; ALTER TABLE … DROP FOREIGN "
        "KEY, then add it with RESTRICT, and change the rows by statements of your own"
    )


def cascades_in(query: str) -> tuple[str, ...]:
    """The faults that a DDL statement brings to the table it makes or alters."""
    if "foreign" not in query.lower() and "references" not in query.lower():
        return ()
    words = [token.text.upper() for token in tokens_of(query)]
    following = itertools.zip_longest(words, words[1:], words[2:], fillvalue="")
    found = [each for each in following if each[0] == "ON" and each[1] in ("DELETE", "UPDATE")]
    return tuple(cascade_fault(" ".join(each)) for each in found if each[2] in ("CASCADE", "SET"))
