"""The syntax that rules about columns, masks and names in the target share: `TABLE=…`, where TABLE
is a rule of a table filter, and names of columns with `*` and `?`. Pure.
"""

import re
from fnmatch import translate
from typing import Final

# `=` ends the table's name, but may stand inside of a quoted name or a regular expression.
_PARTS: Final = re.compile(
    r"""((?:"(?:[^"]|"")*"|`(?:[^`]|``)*`|/(?:[^/\\]|\\.)+/|[^="`/])+)=(.*)""", re.DOTALL
)


def parts_of(text: str) -> tuple[str, str] | None:
    """Return the tables that a rule is about and the rest of its text; None: it does not have that
    form, or begins with `!`.
    """
    match = _PARTS.fullmatch(text)
    if match is None or match[1].strip().startswith("!"):
        return None
    return match[1], match[2]


def column_pattern(name: str) -> re.Pattern[str]:
    """Matches the columns of a name with `*` and `?`, in any case."""
    # fnmatch reads [sets], which these rules do not have: a bracket stands for itself.
    return re.compile(translate(name.replace("[", "[[]")), re.IGNORECASE)
