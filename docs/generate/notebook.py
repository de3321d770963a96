"""The notebook of docs/examples: the page's text and Python blocks as cells."""

import json
import re
from typing import Any

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def notebook(page: str) -> str:
    """A page of Markdown as a Jupyter notebook, without any output."""
    parts = _BLOCK.split(page)
    cells = [
        _cell(number, "code" if number % 2 else "markdown", text.strip())
        for number, text in enumerate(parts)
        if text.strip()
    ]
    document = {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def _cell(number: int, kind: str, text: str) -> dict[str, Any]:
    cell = {
        "cell_type": kind,
        "id": f"cell-{number}",
        "metadata": {},
        "source": text.splitlines(keepends=True),
    }
    return cell | {"execution_count": None, "outputs": []} if kind == "code" else cell
