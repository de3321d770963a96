"""A capture is drained before it is stopped: its tables go to the others, and no row is lost."""

import pytest

from tests.integration.capture.many_tables import Feed
from tests.integration.capture.processes import running_cluster, transaction_client
from tests.integration.capture.test_sharing import is_owner, slices

pytest.importorskip("tikv_client")


@pytest.fixture
def cluster(tmp_path):
    with running_cluster(tmp_path) as running:
        yield running


@pytest.fixture
def store(cluster):
    with transaction_client(cluster) as client:
        yield client


def test_a_capture_that_is_drained_has_no_tables_and_owns_nothing_until_it_is_asked_back(
    cluster, store
):
    captures = [cluster.capture, cluster.another_capture()]
    feed = Feed(cluster, store)
    feed.write(10)
    slices(feed, captures=2)
    owner, other = sorted(cluster.cli("capture", "list"), key=lambda each: not each["is-owner"])

    drained = cluster.cli("capture", "drain", other["id"], "--wait", "60s")
    assert drained == {"id": other["id"], "draining": True, "tables": 0}
    feed.check(slices(feed, captures=1)[0])
    assert "start another one first" in cluster.cli("capture", "drain", owner["id"])
    cluster.cli("capture", "drain", other["id"], "--cancel")
    slices(feed, captures=2)

    status, left = cluster.http("PUT", f"/api/v2/captures/{owner['id']}/drain")
    assert (status, left["current_table_count"] > 0) == (200, True)
    cluster.capture = next(
        each for each in captures if each.endpoints["capture"] == other["address"]
    )
    assert is_owner(cluster, cluster.capture)
    assert cluster.cli("capture", "drain", owner["id"], "--wait", "60s")["tables"] == 0
    feed.write(5)
    feed.check(slices(feed, captures=1)[0])
    cluster.cli("capture", "drain", owner["id"], "--cancel")
    slices(feed, captures=2)

    assert cluster.cli("capture", "resign") == {"resigned": True}
    assert is_owner(cluster, next(each for each in captures if each is not cluster.capture))
    assert cluster.http("PUT", "/api/v2/captures/nobody/drain")[1]["error_code"] == (
        "CDC:ErrCaptureNotExist"
    )
