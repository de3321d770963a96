"""Names of enum values: peers of a later version send numbers that have no name here."""

from typing import Any


def enum_name(enum: Any, number: int) -> str:
    """The name of an enum's value; of a value that has none, its number, as Go prints it."""
    return str(enum.Name(number)) if number in enum.values() else str(number)
