"""Foreign keys that change rows of their own table: what they do is in no event of the log.

A table that has one cannot be replicated: the target would keep its rows as they were.
"""


def cascade_fault(foreign_key: str) -> str:
    """Why a table with that foreign key cannot be replicated, and what to do."""
    return (
        f"its rows change by the foreign key {foreign_key}, which the log does not have; ALTER "
        "TABLE … DROP FOREIGN "
        "KEY, then add it with RESTRICT, and change the rows by statements of your own"
    )
