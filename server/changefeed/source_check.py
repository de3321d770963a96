"""What `cli source check` asks of a source, whatever its kind. Pure."""

from dataclasses import dataclass
from typing import Final

OK: Final = "ok"
WARNING: Final = "warning"
FAILURE: Final = "failure"


@dataclass(frozen=True, slots=True)
class Check:
    """One question and its answer; `fix` is SQL or a line of configuration where that helps."""

    name: str
    state: str
    """A failure would make a target wrong or a changefeed stop; a warning is what an operator
    should know.
    """
    found: str
    why: str = ""
    fix: str = ""
