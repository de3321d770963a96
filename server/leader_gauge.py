"""A gauge whose value only a leader or owner knows.

The rule, the same in every daemon: a daemon that does not lead shows no sample of such a gauge, and
neither one that has led. Its last value would look like the present one, and sums and minimums over
all daemons would count it. That a daemon leads at all is a plain gauge, 1 or 0.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class LeaderGauge(Collector):
    """Has one sample while its value is known here, and none otherwise; for any thread."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._name = name
        self._text = text
        self._read: Callable[[], float] | None = None
        registry.register(self)

    def set(self, value: float) -> None:
        """Show this value from now on."""
        self._read = lambda: value

    def clear(self) -> None:
        """Show nothing: this daemon does not lead."""
        self._read = None

    @contextmanager
    def showing(self, read: Callable[[], float]) -> Iterator[None]:
        """Show for the block what `read` returns when a scrape asks."""
        self._read = read
        try:
            yield
        finally:
            # The next term may have begun to show its own.
            if self._read is read:
                self._read = None

    def describe(self) -> list[GaugeMetricFamily]:
        """The family, without a sample."""
        return [GaugeMetricFamily(self._name, self._text)]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The family, with a sample while there is a value."""
        family, read = GaugeMetricFamily(self._name, self._text), self._read
        if read is not None:
            family.add_metric([], read())
        yield family
