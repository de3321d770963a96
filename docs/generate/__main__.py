"""`python -m docs.generate [--check]`: writes the pages of docs/reference that say what the code
says; with --check it names those that are not as the code is, and ends with 1.
"""

import io
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout

from docs.generate import command_line, errors, metrics, types
from docs.generate.source import ROOT, modules
from server.cli import config
from server.cli.commands import tidemark

_SETTINGS_HEAD = """# Settings

A setting `data-dir` of the section `store` is the flag `--data-dir` of `tidemark store`, the
environment variable `TIDEMARK_STORE_DATA_DIR`, and `data-dir` under `[store]` in the file that
`--config` names. Flags win over the environment, and it wins over the file. The sections
`security`, `rpc` and `log` are for every daemon. `tidemark config reference` prints this page,
`tidemark config check FILE` checks a file.
"""


def pages() -> Mapping[str, str]:
    """The generated pages by name.

    Raises:
        CatalogueError: the catalogue of errors is not the code's.
    """
    trees = list(modules())
    top = tidemark()
    return {
        "command-line.md": command_line.page(top),
        "errors.md": errors.page([tree for _, tree in trees], top),
        "metrics.md": metrics.page(trees),
        "settings.md": f"{_SETTINGS_HEAD}\n{_settings()}",
        "types.md": types.page(),
    }


def _settings() -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        config.run(["reference"])
    return printed.getvalue()


def main(arguments: Sequence[str]) -> int:
    """Write or check the pages; returns the exit code."""
    try:
        wanted = pages()
    except errors.CatalogueError as err:
        print(err, file=sys.stderr)
        return 1
    directory = ROOT / "docs/reference"
    old = [
        name for name, text in wanted.items()
        if not (directory / name).exists() or (directory / name).read_text(encoding="utf-8") != text
    ]  # fmt: skip
    if "--check" not in arguments:
        for name in old:
            (directory / name).write_text(wanted[name], encoding="utf-8")
        return 0
    for name in old:
        print(f"docs/reference/{name} is not what the code says: run `make docs`", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
