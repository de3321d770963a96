"""PromQL of the panels. Rates are over `$__rate_interval`, which Grafana makes at least four
scrapes long.
"""

from typing import Final

CHOSEN: Final = 'changefeed=~"$changefeed"'
"""The changefeeds that one chose at the top of a dashboard."""
RUNS: Final = 'daemon!=""'
"""The processes of a cluster."""


def rate(metric: str, by: str = "", labels: str = "") -> str:
    """How fast a counter grows, summed by some labels."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{labels}}}[$__rate_interval]))"


def quantile(share: float, histogram: str, by: str = "", labels: str = "") -> str:
    """A quantile of a histogram's observations of late."""
    grouped = f"le, {by}" if by else "le"
    buckets = f"rate({histogram}_bucket{{{labels}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by ({grouped}) ({buckets}))"


def mean(histogram: str, by: str, labels: str = "") -> str:
    """The mean of a histogram's observations of late."""
    return f"{rate(f'{histogram}_sum', by, labels)} / {rate(f'{histogram}_count', by, labels)}"
