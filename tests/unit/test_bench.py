"""The runner of the benches: its suite fits them, runs take turns, results are kept and told.

Nothing here depends on how fast anything is.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.bench import report
from tests.bench.__main__ import Bench, BenchError, Rounds, Subject, main, suite
from tests.bench.lake_processes import Spent, own_cpu_s

BENCH = Bench(name="b", module="m", grows="rows", sizes=[1], figures=["per_s"])


class ParsedError(Exception):
    """The flags were understood; the bench itself is not to run."""


@pytest.mark.parametrize("bench", suite(), ids=lambda bench: bench.name)
def test_each_bench_of_the_suite_takes_its_flags(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args
    arguments = bench.arguments(bench.sizes[-1])

    def parsed(parser: argparse.ArgumentParser, *_: Any) -> None:
        found = vars(parse(parser, arguments))
        size = found[bench.grows.replace("-", "_")]
        assert size in (bench.sizes[-1], [bench.sizes[-1]])
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    with pytest.raises(ParsedError):
        importlib.import_module(f"tests.bench.{bench.module}").main()


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(SystemExit, match=r"no bench is named Tsoo; there are: .*Tso,"):
        suite(["Tsoo"])


def test_a_short_run_takes_the_smallest_sizes() -> None:
    assert [bench.sizes for bench in suite(["Tso", "sink"], 1)] == [[1], [100]]
    assert [len(bench.sizes) for bench in suite(["Tso"])] == [3]


class Counting(Subject):
    """The nth run of all gives n."""

    turns: Sequence[str] = ()

    def run(self, bench: Bench, size: int) -> dict[str, Any]:
        type(self).turns = [*self.turns, self.name]
        return {"per_s": float(len(self.turns))}


def test_subjects_take_turns_and_ratios_are_made_of_runs_that_follow_each_other() -> None:
    Counting.turns = []
    rounds = Rounds(BENCH, 1)
    rounds.measure([Counting("base"), Counting("this")], 3)
    assert Counting.turns == ["base", "this", "this", "base", "base", "this"]
    assert rounds.values == {"base": {"per_s": [1, 4, 5]}, "this": {"per_s": [2, 3, 6]}}
    assert rounds.ratios("this", "base", "per_s") == [2, 0.75, 1.2]


def test_a_bench_that_fails_says_why() -> None:
    bench = Bench(name="b", module="no_such", grows="rows", sizes=[1], figures=[])
    with pytest.raises(BenchError, match="No module named"):
        Subject("ours").run(bench, 1)


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    page = f"# Benchmarks\n\n{report.BEGIN}\nold\n{report.END}\n\nBy hand.\n"
    once = report.put_between(page, "new")
    assert once == page.replace("old", "new")
    assert report.put_between(once, "new") == once
    added = report.put_between("# Benchmarks\n", "new")
    assert added == f"# Benchmarks\n\n{report.BEGIN}\nnew\n{report.END}\n"


def test_another_run_replaces_its_own_entries_and_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for size, value in ((1, 7.0), (2, 8.0), (1, 9.0)):
        entry = {"bench": "b", "size": size, "values": {"ours": {"per_s": [value]}}}
        report.Results(path, {"cores": 2}).add(entry)
    found = report.entries_of(path)
    assert [(one["size"], one["values"]["ours"]["per_s"]) for one in found] == [(1, [9]), (2, [8])]
    assert all(one["machine"] == {"cores": 2} for one in found)


def test_a_bench_is_run_at_its_sizes_and_told_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        '[[bench]]\nname = "TiDB rows"\nmodule = "mounter"\ngrows = "rows"\n'
        'sizes = [1000, 2000]\nfigures = ["cpu_us_per_op", "per_s"]\n'
        '[[bench]]\nname = "broken"\nmodule = "no_such"\ngrows = "rows"\n'
        "sizes = [1]\nfigures = []\n"
    )
    table = tmp_path / "suite.toml"
    table.write_text(text)
    monkeypatch.setattr("tests.bench.__main__.SUITE", table)
    directory = tmp_path / "benchmarks"

    assert main(["run", "--rounds", "2", "--into", str(directory)]) == 1  # one of two is broken

    results = json.loads((directory / "results.json").read_text())
    assert [(one["bench"], one["size"]) for one in results] == [
        ("TiDB rows", 1000),
        ("TiDB rows", 2000),
    ]
    assert all(len(one["values"]["ours"]["per_s"]) == 2 for one in results)
    page = (tmp_path / "benchmarks.md").read_text()
    assert "| rows | | cpu_us_per_op | per_s | load |" in page
    assert "![TiDB rows](benchmarks/tidb-rows.svg)" in page
    assert (directory / "tidb-rows.svg").read_text().startswith("<svg")

    before = page
    assert main(["report", "--into", str(directory)]) == 0
    assert (tmp_path / "benchmarks.md").read_text() == before


def test_a_process_costs_what_the_system_says_of_it() -> None:
    before = sum(os.times()[:4])
    found = own_cpu_s(os.getpid())
    assert before <= found + 0.001
    assert found <= sum(os.times()[:4]) + 0.001


DAEMON = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.{action})
worker = os.fork()
if worker == 0:
    while time.process_time() < 0.1:
        pass
    print("worked", flush=True)
    signal.pause()
sys.stdin.readline()
os.kill(worker, signal.SIGKILL)
try:
    os.waitpid(worker, 0)
except ChildProcessError:
    pass  # where it is ignored, the system says so when the last child has ended
print("ended", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("action", ["SIG_IGN", "SIG_DFL"])
def test_what_an_ended_worker_took_counts_once(action: str) -> None:
    # Spark's Python daemons ignore SIGCHLD, and the system then forgets what their workers took.
    command = [sys.executable, "-c", DAEMON.format(action=action)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stdin is not None
        assert daemon.stdout is not None
        spent = Spent(daemon.pid)
        assert daemon.stdout.readline() == "worked\n"
        before = spent.cpu_s
        assert before >= 0.1
        daemon.stdin.write("\n")
        daemon.stdin.flush()
        assert daemon.stdout.readline() == "ended\n"
        # What is counted twice, or forgotten, is all that the worker took.
        assert abs(spent.cpu_s - before) < 0.1
        daemon.stdin.close()
