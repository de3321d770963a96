"""What the reference is made of: `make check` compares the pages themselves with the code."""

import ast
import json
from pathlib import Path

import pytest

from docs.generate import command_line, errors, metrics
from docs.generate.notebook import notebook
from server.cli.completion import Argument, Command

FLAG = Argument(("-s", "--size"), "BYTES", (), "how large | small", required=True)
TOP = Command((), "", below=(Command(("go",), "walk", (FLAG,)),))


def page_of(tmp_path, monkeypatch, catalogue: str, code: str) -> str:
    (tmp_path / errors.CATALOGUE).parent.mkdir(parents=True)
    (tmp_path / errors.CATALOGUE).write_text(catalogue)
    monkeypatch.setattr(errors, "ROOT", tmp_path)
    return errors.page([ast.parse(code)], TOP)


def entry(code: str, workaround: str = "run `tidemark go --size 3`") -> str:
    return f'[{code}]\nmeaning = "gone"\nworkaround = "{workaround}"\n'


def test_codes_are_found_alone_and_within_messages() -> None:
    tree = ast.parse('code = "ErrOne"\nraise E(f"[TM:ErrTwo] {x}")\ntext = "an ErrThree of theirs"')
    assert errors.codes([tree]) == {"ErrOne", "ErrTwo"}


def test_every_code_is_a_row(tmp_path, monkeypatch) -> None:
    page = page_of(tmp_path, monkeypatch, entry("ErrOne"), 'code = "ErrOne"')
    assert "| `ErrOne` | gone | run `tidemark go --size 3` |" in page


@pytest.mark.parametrize(
    ("catalogue", "said"),
    [
        ("", "has no ErrOne"),
        (entry("ErrOne") + entry("ErrTwo"), "has ErrTwo, which no module has"),
        (entry("ErrTwo") + entry("ErrOne"), "not in the order"),
        (entry("ErrOne", ""), "has to have a meaning and a workaround"),
        (entry("ErrOne", "run `tidemark stop`"), "names `tidemark stop`, which there is not"),
        (entry("ErrOne", "pass --length"), "names --length, which no command has"),
    ],
)
def test_what_is_wrong_with_the_catalogue_is_told(tmp_path, monkeypatch, catalogue, said) -> None:
    with pytest.raises(errors.CatalogueError, match=said):
        page_of(tmp_path, monkeypatch, catalogue, 'code = "ErrOne"')


def test_metrics_are_found_where_they_are_made() -> None:
    code = """
A = Counter("tidemark_a_total", "as made", ["kind"])
B = GaugeMetricFamily("tidemark_b", "bs.", labels=["x", "y"])
C = {"tidemark_c": "cs of a changefeed"}
D = Counter(names)
"""
    found = metrics.metrics(Path("server/pump/metrics.py"), ast.parse(code))
    assert sorted((each.name, each.kind, each.labels, each.meaning) for each in found) == [
        ("tidemark_a_total", "counter", ("kind",), "As made"),
        ("tidemark_b", "gauge", ("x", "y"), "Bs"),
        ("tidemark_c", "gauge", ("changefeed",), "Cs of a changefeed"),
    ]


def test_flags_are_rows_whose_bars_end_no_cell() -> None:
    page = command_line.page(TOP)
    assert "## tidemark go" in page
    assert "| `-s, --size BYTES` | how large \\| small (required) |" in page


def test_a_command_that_a_text_names_has_the_verb_and_the_flags() -> None:
    verb = Command(("cli", "list"), "", (FLAG,))
    commands = {
        each.words: each for each in (*TOP.walk(), Command(("cli",), "", below=(verb,)), verb)
    }
    for text in ("go", "go --size=3 …", "cli", "cli --pd a:1 list --size 3", "cli list, and more"):
        assert command_line.fits(text, commands), text
    for text in ("walk", "go --sizes 3", "cli show", "cli list --all"):
        assert not command_line.fits(text, commands), text


def test_a_notebook_has_the_texts_and_blocks_of_its_page() -> None:
    cells = json.loads(notebook("# Title\n\n```python\na = 1\nb = 2\n```\n\nend\n"))["cells"]
    assert [(each["cell_type"], "".join(each["source"])) for each in cells] == [
        ("markdown", "# Title"),
        ("code", "a = 1\nb = 2"),
        ("markdown", "end"),
    ]
