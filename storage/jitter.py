"""Chance in waiting times: those who failed together should not come again together."""

import random


def jittered(pause: float) -> float:
    """Between a half of `pause` and all of it."""
    return pause * random.uniform(0.5, 1.0)  # noqa: S311 - it keeps nothing secret
