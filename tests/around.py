"""Calls around functions of the product, in processes that are to die at one of their steps."""

from collections.abc import Callable
from typing import Any


def wrap(
    owner: Any, name: str, before: Callable[[], None] = int, after: Callable[[], None] = int
) -> None:
    """Call `before` and `after` around a function of a module or class."""
    wrapped = getattr(owner, name)

    def around(*arguments: Any, **named: Any) -> Any:
        before()
        result = wrapped(*arguments, **named)
        after()
        return result

    setattr(owner, name, around)
