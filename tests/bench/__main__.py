"""All benches of tests/bench/suite.toml, at three sizes each; or two checkouts, one against the
other.

`python -m tests.bench run` measures this checkout, and a peer beside it where the environment names
its program (tests/bench/peers.py): the two take turns. Each run's figures go to
docs/benchmarks/results.json as they come, so one that is stopped keeps what it has; at the end the
tables between the marks of docs/benchmarks.md and the pictures are made from that file.
`python -m tests.bench report` makes only these.

`python -m tests.bench compare COMMIT` measures a checkout of the commit and this one, which take
turns, and prints medians and ratios. A machine that others share is faster in one minute than in
the next: a ratio is made of two runs that followed each other, and the median of these ratios and
how far they lie apart are what counts. Rates and latencies say little on a busy machine; CPU does.

`--only NAME …` chooses benches, `--sizes N` their N smallest sizes, `--rounds N` how often each
runs. Both commands go on after a bench that fails, name it at the end, and return 1.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench import peers, report

TREE = Path(__file__).parents[2]
SUITE = Path(__file__).with_name("suite.toml")
BASE = TREE / "build" / "bench-base"
PATIENCE_S = 1800.0
OURS, PEER = "ours", "peer"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One bench: see suite.toml."""

    name: str
    module: str
    grows: str
    sizes: list[int]
    figures: list[str]
    flags: str = ""
    peer: str = ""

    def arguments(self, size: int) -> list[str]:
        """The flags of a run of this size."""
        return [*shlex.split(self.flags), f"--{self.grows}", str(size)]


@dataclass(frozen=True)
class Subject:
    """What is measured: a checkout, and maybe flags that name a peer which its bench measures."""

    name: str
    tree: Path = TREE
    flags: Sequence[str] = ()

    def run(self, bench: Bench, size: int) -> dict[str, Any]:
        """The figures of one run.

        Raises:
            BenchError: it failed, or printed no figures.
        """
        command = [sys.executable, "-m", f"tests.bench.{bench.module}", *bench.arguments(size)]
        rooms = (self.tree, self.tree / "proto" / "gen", self.tree / "sink" / "spark")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, rooms))}
        status, lines, errors = _finished([*command, *self.flags], self.tree, environment)
        if status or not lines:
            raise BenchError(f"{bench.name}, {self.name}: {errors[-2000:] or 'no line'}")
        printed = json.loads(lines[-1])
        return {figure: printed[figure] for figure in bench.figures}


def _finished(
    command: list[str], tree: Path, environment: dict[str, str]
) -> tuple[int, list[str], str]:
    """Run a bench to its end: its status, its lines, and what it said of errors."""
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            # A bench that is interrupted leaves the daemons that it started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output.splitlines(), errors


class BenchError(Exception):
    """A bench that ended without figures."""


@dataclass
class Rounds:
    """The runs of one bench at one size: a list of values for each subject and figure."""

    bench: Bench
    size: int
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def measure(self, subjects: Sequence[Subject], rounds: int) -> None:
        """Run the subjects in turn, in every second round in the opposite order."""
        for number in range(rounds):
            for subject in subjects if number % 2 == 0 else reversed(subjects):
                figures = self.values.setdefault(subject.name, {})
                for name, value in subject.run(self.bench, self.size).items():
                    figures.setdefault(name, []).append(value)

    def ratios(self, over: str, under: str, figure: str) -> list[float]:
        """`over` by `under`, round by round; rounds without a figure to divide by are left out."""
        pairs = zip(self.values[over][figure], self.values[under][figure], strict=True)
        return [round(one / other, 3) for one, other in pairs if other]

    def document(self) -> dict[str, Any]:
        """As results.json has it."""
        return {
            "bench": self.bench.name,
            "grows": self.bench.grows,
            "size": self.size,
            "flags": self.bench.flags,
            "values": self.values,
            "load_1m": round(os.getloadavg()[0], 1),
        }


def suite(only: Sequence[str] = (), sizes: int | None = None) -> list[Bench]:
    """The benches of suite.toml, all or those with a name in `only`, at their smallest `sizes`."""
    benches = [Bench(**entry) for entry in tomllib.loads(SUITE.read_text())["bench"]]
    unknown = set(only) - {bench.name for bench in benches}
    if unknown:
        names = ", ".join(bench.name for bench in benches)
        raise SystemExit(f"no bench is named {', '.join(sorted(unknown))}; there are: {names}")
    return [
        replace(bench, sizes=bench.sizes[:sizes])
        for bench in benches
        if not only or bench.name in only
    ]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(pages / (1 << 30)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
    }


def run(arguments: argparse.Namespace) -> list[str]:
    """Measure this checkout, and peers; returns what failed."""
    results = report.Results(arguments.into / "results.json", machine())
    failed: list[str] = []
    for bench in suite(arguments.only, arguments.sizes):
        with ExitStack() as stack:
            subjects = [Subject(OURS)]
            if peers.is_given(bench.peer):
                flags = stack.enter_context(peers.running_peer(bench.peer))
                subjects.append(Subject(PEER, flags=flags))
            for rounds in _measured(bench, subjects, arguments.rounds, failed):
                results.add(rounds.document())
    report.write(arguments.into)
    return failed


def compare(arguments: argparse.Namespace) -> list[str]:
    """Measure a commit and this checkout in turn; returns what failed."""
    failed: list[str] = []
    print("| bench | size | figure | base | this | this / base | from | to |")
    print("|---|---|---|---|---|---|---|---|")
    with checkout(arguments.commit) as tree:
        subjects = [Subject("base", tree), Subject("this")]
        for bench in suite(arguments.only, arguments.sizes):
            for rounds in _measured(bench, subjects, arguments.rounds, failed):
                for figure in bench.figures:
                    print(_ratio_line(rounds, figure), flush=True)
    return failed


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A work tree of a commit, for the block."""
    # One that was interrupted left its own.
    if BASE.exists():
        _git("worktree", "remove", "--force", str(BASE))
    _git("worktree", "add", "--force", "--detach", str(BASE), commit)
    try:
        yield BASE
    finally:
        _git("worktree", "remove", "--force", str(BASE))


def _measured(
    bench: Bench, subjects: Sequence[Subject], count: int, failed: list[str]
) -> Iterator[Rounds]:
    for size in bench.sizes:
        rounds = Rounds(bench, size)
        print(f"{bench.name}, {bench.grows} {size}", file=sys.stderr, flush=True)
        try:
            rounds.measure(subjects, count)
        except (BenchError, KeyError, ValueError, subprocess.TimeoutExpired) as err:
            # One peer or bench that does not run here must not cost the others' hours.
            failed.append(f"{bench.name}, {bench.grows} {size}: {err!r}")
        else:
            yield rounds


def _ratio_line(rounds: Rounds, figure: str) -> str:
    ratios = rounds.ratios("this", "base", figure)
    base, this = (median(rounds.values[name][figure]) for name in ("base", "this"))
    shown = [f"{base:g}", f"{this:g}"]
    shown += (
        [f"{n:.2f}" for n in (median(ratios), min(ratios), max(ratios))] if ratios else ["", "", ""]
    )
    size = f"{rounds.bench.grows} {rounds.size}"
    return f"| {rounds.bench.name} | {size} | {figure} | {' | '.join(shown)} |"


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=TREE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Do one of the three; the status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "report", "compare"])
    parser.add_argument("commit", nargs="?", help="with compare")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these benches")
    parser.add_argument("--sizes", type=int, help="so many sizes of each, from the smallest on")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each bench and size")
    parser.add_argument(
        "--into", type=Path, default=report.DIRECTORY, help="where results and pictures go"
    )
    arguments = parser.parse_args(argv)
    failed: list[str] = []
    if arguments.command == "report":
        report.write(arguments.into)
    elif arguments.command == "run":
        failed = run(arguments)
    elif arguments.commit:
        failed = compare(arguments)
    else:
        parser.error("compare with which commit?")
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
