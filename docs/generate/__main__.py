"""`python -m docs.generate [--check]`: writes the pages of docs/reference that say what the code
says, and the notebook of the example; with --check it names those that are not as the code is, and
ends with 1.
"""

import io
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout

from docs.generate import command_line, errors, metrics, types
from docs.generate.notebook import notebook
from docs.generate.source import ROOT, modules
from server.cli import config
from server.cli.completion import tidemark

_SETTINGS_HEAD = """# Settings

A setting `data-dir` of the section `store` is the flag `--data-dir` of `tidemark store`, the
environment variable `TIDEMARK_STORE_DATA_DIR`, and `data-dir` under `[store]` in the file that
`--config` names. Flags win over the environment, and it wins over the file. The sections
`security`, `rpc` and `log` are for every daemon. `tidemark config reference` prints this page,
`tidemark config check FILE` checks a file.
"""


def pages() -> Mapping[str, str]:
    """The generated files by their paths in docs.

    Raises:
        CatalogueError: the catalogue of errors is not the code's, or a text names a command that
            there is not.
    """
    trees = list(modules())
    top = tidemark()
    if unknown := list(command_line.unknown(top, [tree for _, tree in trees])):
        raise errors.CatalogueError("\n".join(unknown))
    example = (ROOT / "docs/examples/read_a_changefeed.md").read_text(encoding="utf-8")
    return {
        "examples/read_a_changefeed.ipynb": notebook(example),
        "reference/command-line.md": command_line.page(top),
        "reference/errors.md": errors.page([tree for _, tree in trees], top),
        "reference/metrics.md": metrics.page(trees),
        "reference/settings.md": f"{_SETTINGS_HEAD}\n{_settings()}",
        "reference/types.md": types.page(),
    }


def _settings() -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        config.run(["reference"])
    return printed.getvalue()


def main(arguments: Sequence[str]) -> int:
    """Write or check the pages; returns the exit code."""
    try:
        texts = pages()
    except errors.CatalogueError as err:
        print(err, file=sys.stderr)
        return 1
    directory = ROOT / "docs"
    old = [
        name for name, text in texts.items()
        if not (directory / name).exists() or (directory / name).read_text(encoding="utf-8") != text
    ]  # fmt: skip
    if "--check" not in arguments:
        for name in old:
            (directory / name).write_text(texts[name], encoding="utf-8")
        return 0
    for name in old:
        print(f"docs/{name} is out of date: run `make docs`", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
