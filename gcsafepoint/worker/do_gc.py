"""The phase Do GC: old versions go. Distributed: every store is told the safepoint; central: each region is asked."""

from collections.abc import Callable

from gcsafepoint.worker.cluster import Cluster
from gcsafepoint.worker.config import CENTRAL, GCConfig
from storage.model.errors import InvalidError


class CollectUnsupportedError(InvalidError):
    """The stores do not take GC requests."""

    code = "ErrGCModeUnsupported"


async def do_gc(cluster: Cluster, config: GCConfig, safe_point: int, superseded: Callable[[], bool]) -> None:
    """Publish `safe_point`; in mode central also walk all regions, unless a newer round has `superseded` this one.

    Raises:
        CollectUnsupportedError: mode central with stores that collect by themselves only.
    """
    await cluster.publish_safe_point(safe_point)
    key: bytes | None = b"" if config.mode == CENTRAL else None
    while key is not None and not superseded():
        key = await cluster.collect(key, safe_point)


async def check_mode(cluster: Cluster, config: GCConfig) -> None:
    """Try mode central with a safepoint before all history, which collects nothing. Raises as `do_gc`."""
    if config.mode == CENTRAL:
        await cluster.collect(b"", 0)
