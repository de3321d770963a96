"""One cluster a test module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.store.daemons import Cluster, running_cluster


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Coordinator and store, kept for the module; the store takes the module's STORE_FLAGS, too."""
    flags: tuple[str, ...] = getattr(request.module, "STORE_FLAGS", ())
    directory: Path = tmp_path_factory.mktemp("cluster")
    with running_cluster(directory, "--gc-poll-interval", "0.5", *flags) as started:
        yield started
