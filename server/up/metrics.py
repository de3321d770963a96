"""One `/metrics` for the whole tree: the children's samples, told apart by the label `daemon`."""

import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_SCRAPE_SECONDS = 2.0


class Scraped(Protocol):
    """A daemon with a name and, among its endpoints, an HTTP address."""

    name: str
    endpoints: dict[str, str]


class TreeCollector(Collector):
    """Asks each daemon of the tree for its metrics;
    one that does not answer is `tidemark_up_alive` 0.
    """

    def __init__(self, daemons: Sequence[Scraped]) -> None:
        self._daemons = daemons

    def describe(self) -> list[Metric]:
        """Nothing is known before the daemons are asked."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families of all daemons."""
        alive = Metric("tidemark_up_alive", "1 if the daemon answered this scrape", "gauge")
        families: dict[str, Metric] = {}
        for daemon in self._daemons:
            text = _scrape(daemon.endpoints.get("http", ""))
            alive.add_sample(alive.name, {"daemon": daemon.name}, 0.0 if text is None else 1.0)
            for family in text_string_to_metric_families(text or ""):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    merged.add_sample(
                        sample.name, {**sample.labels, "daemon": daemon.name}, sample.value
                    )
        yield alive
        yield from families.values()


REGISTRY = CollectorRegistry()
"""What `tidemark up` shows: only its children, its own process is of no interest."""


@contextmanager
def collect_from(daemons: Sequence[Scraped]) -> Iterator[None]:
    """Show the daemons' metrics in `REGISTRY` for the block."""
    collector = TreeCollector(daemons)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)


def _scrape(address: str) -> str | None:
    if not address:
        return None
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=_SCRAPE_SECONDS) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return None
