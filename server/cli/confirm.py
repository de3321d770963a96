"""Asking before something is done that cannot be undone; where nobody can be asked, the answer is no."""

import argparse
import sys

from storage.model.errors import InvalidError


class NotConfirmedError(InvalidError):
    """The user did not say yes."""

    code = "ErrNotConfirmed"


def add_yes(verb: argparse.ArgumentParser, text: str = "do not ask") -> None:
    """Add the flag that says yes beforehand; `--no-confirm` is its name in `cdc cli`."""
    verb.add_argument("--yes", "--no-confirm", action="store_true", help=text)


def confirm(question: str) -> None:
    """Ask at the terminal.

    Raises:
        NotConfirmedError: the answer is another one than yes, or there is no terminal.
    """
    if not sys.stdin.isatty():
        raise NotConfirmedError(f"{question} Pass --yes or --no-confirm to say yes where nobody can be asked")
    print(f"{question} [Y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise NotConfirmedError("nothing was changed")
