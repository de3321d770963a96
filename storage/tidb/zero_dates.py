"""What a changefeed makes of dates that no calendar has, such as 0000-00-00."""

from typing import Final

NULL_DATES: Final = "null"
SHOWN_DATES: Final = (NULL_DATES, "key-text", "text")
"""How a changefeed shows dates that no calendar has: as null, where one in a key stops it; or
columns of dates, those of keys or all of them, are text.
"""
ZERO_DATES: Final = "tidemark_zero_dates"
"""A member of a table's document that is ours: which of its columns of dates are text
(`dates_as_text`).
"""
