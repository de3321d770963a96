"""Commands that need more than the daemons' image has."""

import sys

import pytest

from server.cli import main as module
from server.cli.main import main


class Missing:
    """A finder for which no module of these names is there."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        del path, target
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    ("command", "absent", "extra"),
    [
        ("spark run", "pyspark", "spark"),
        ("play", "pyspark", "spark"),
        ("demo", "tikv_client", "demo"),
    ],
)
def test_what_is_not_installed_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    absent: str,
    extra: str,
) -> None:
    monkeypatch.setattr(sys, "meta_path", [Missing(absent), *sys.meta_path])
    for name in [each for each in sys.modules if each.partition(".")[0] == absent]:
        monkeypatch.delitem(sys.modules, name)
    assert main(command.split()) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"[TM:ErrNotInstalled] this command needs {absent}")
    assert f"tidemark-cdc[{extra}]" in told


def _deep() -> ExceptionGroup[Exception]:
    return ExceptionGroup(
        "tasks", [ExceptionGroup("more", [ModuleNotFoundError(name="pandas.core")])]
    )


@pytest.mark.parametrize("error", [ModuleNotFoundError(name="pyspark.sql"), _deep()])
def test_what_a_command_misses_on_its_way_is_told_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(command: str, argv: list[str]) -> int:
        del command, argv
        raise error

    monkeypatch.setattr(module, "_call", fail)
    assert main(["cli", "verify"]) == 1
    assert "ErrNotInstalled" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError(name="server.nowhere"), ExceptionGroup("x", [ValueError()])]
)
def test_a_defect_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(command: str, argv: list[str]) -> int:
        del command, argv
        raise error

    monkeypatch.setattr(module, "_call", fail)
    with pytest.raises(type(error)):
        main(["cli", "verify"])
