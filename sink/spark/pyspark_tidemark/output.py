"""The lines by which a child process of `tidemark spark` tells what it does."""

import json
import os
from typing import IO, Any


def own_output() -> IO[str]:
    """Keep standard output for the process's lines; whatever else writes there goes to standard
    error. The JVM, too: it inherits the descriptors.
    """
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


def write_line(out: IO[str], document: dict[str, Any]) -> None:
    """Write a line of JSON, at once."""
    out.write(json.dumps(document) + "\n")
    out.flush()
