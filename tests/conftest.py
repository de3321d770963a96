"""What all tests share.

Hypothesis has no deadline per example, and does not mind how long examples take to make: a busy
machine misses both. It tries the same examples every time, as it does with CI=true: a change is
judged by what it changes. For others there is TIDEMARK_TEST_EXPLORE=1. `timeout` bounds tests: what
hangs is to end some time, what is slow is not.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

import server as _before_grpc  # noqa: F401 - it says how gRPC forks, before a test imports gRPC
from tests.mariadb import MariaDb, running_mariadb

_BY_CHANCE = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
_EXPLORES = "TIDEMARK_TEST_EXPLORE" in os.environ
_NIGHTLY = "TIDEMARK_TEST_NIGHTLY"
settings.register_profile(
    "tidemark", deadline=None, derandomize=not _EXPLORES, suppress_health_check=_BY_CHANCE
)
settings.load_profile("tidemark")

PATIENCE_S = 400
_HERE = Path(__file__).parent


def pytest_configure() -> None:
    """Open as many files as daemons do: some tests hold more connections than the soft limit of
    shells allows.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def nightly_tests() -> frozenset[str]:
    """The tests of nightly.txt, as pytest names them from this directory on."""
    lines = (_HERE / "nightly.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by `-m nightly`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No test has less time than this: it may be the first to need a server that others share,
    on a busy machine. Nightly ones are skipped by day.
    """
    nightly = nightly_tests()
    for item in items:
        if item.nodeid.removeprefix("tests/") in nightly:
            item.add_marker(pytest.mark.nightly)
        if item.get_closest_marker("nightly") and _NIGHTLY not in os.environ:
            item.add_marker(pytest.mark.skip(f"nightly: make test-nightly, or {_NIGHTLY}=1"))
        bound = item.get_closest_marker("timeout")
        if bound is None or bound.args[0] < PATIENCE_S:
            item.add_marker(pytest.mark.timeout(PATIENCE_S), append=False)


def pytest_runtest_setup() -> None:
    """A command that ran in this process has set up its logs:
    levels of it are not those of the next test.
    """
    structlog.reset_defaults()
    # Where `rich` is installed, a traceback takes a third of a second of CPU.
    plain = structlog.dev.ConsoleRenderer(
        colors=False, exception_formatter=structlog.dev.plain_traceback
    )
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDb]:
    """One server for a whole session: work in a `database()` of your own,
    and leave its settings alone.
    """
    with running_mariadb() as server:
        yield server
