"""One `/metrics` for a capture and its workers:
the workers' samples are told apart by the label `worker`.
"""

import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from prometheus_client import REGISTRY as OWN
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families

_SCRAPE_S = 1.0


class Scraped(Protocol):
    """A worker by its number, and where it answers over HTTP."""

    number: int

    @property
    def http(self) -> str:
        """`host:port`; empty while it does not run."""
        ...


class WorkersRegistry(CollectorRegistry):
    """This process's metrics, and in the same families those of its workers."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: Sequence[Scraped] = ()

    def collect(self) -> Iterator[Metric]:
        """All families; a worker that does not answer is `tidemark_capture_worker_up` 0."""
        families = {family.name: family for family in OWN.collect()}
        up = Metric(
            "tidemark_capture_worker_up", "1 if the worker process answered this scrape", "gauge"
        )
        for worker in self.workers:
            label = {"worker": str(worker.number)}
            text = _scrape(worker.http)
            up.add_sample(up.name, label, 0.0 if text is None else 1.0)
            for family in text_string_to_metric_families(text or ""):
                # a part of another family, which has the label already
                if family.name.endswith("_created"):
                    continue
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    merged.add_sample(sample.name, {**sample.labels, **label}, sample.value)
        if self.workers:
            families[up.name] = up
        yield from families.values()


REGISTRY = WorkersRegistry()
"""What `tidemark capture` shows."""


@contextmanager
def collect_from(workers: Sequence[Scraped]) -> Iterator[None]:
    """Show the workers' metrics in `REGISTRY` for the block."""
    REGISTRY.workers = workers
    try:
        yield
    finally:
        REGISTRY.workers = ()


def _scrape(address: str) -> str | None:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=_SCRAPE_S) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError):
        return None
