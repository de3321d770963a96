"""Keys of the captures' records in the metadata. Pure."""

from typing import Final

_ROOT: Final = "/tidemark/default"
ROOT: Final = f"{_ROOT}/".encode()
"""What all records of captures and changefeeds begin with."""
OWNER: Final = f"{_ROOT}/owner".encode()
CAPTURES: Final = f"{_ROOT}/capture/".encode()
DRAINING: Final = f"{_ROOT}/draining/".encode()
PLACEMENTS: Final = f"{_ROOT}/placement/".encode()
MAINTAINERS: Final = f"{_ROOT}/maintainer/".encode()
RELEASED: Final = f"{_ROOT}/released/".encode()
CHANGEFEEDS: Final = f"{_ROOT}/changefeed/".encode()
"""The prefix of all records of changefeeds."""
INFOS: Final = f"{_ROOT}/changefeed/info/".encode()
STATUSES: Final = f"{_ROOT}/changefeed/status/".encode()
SCHEMAS: Final = f"{_ROOT}/changefeed/schema/".encode()
SOURCES: Final = f"{_ROOT}/changefeed/source/".encode()
JOBS: Final = f"{_ROOT}/changefeed/job/".encode()
READERS: Final = f"{_ROOT}/changefeed/reader/".encode()
AUDITS: Final = f"{_ROOT}/changefeed/audit/".encode()
REQUESTS: Final = f"{_ROOT}/request/".encode()
DRAINERS: Final = b"/tidb-binlog/v1/drainers/"
_DRAINERS_OF_CHANGEFEEDS: Final = DRAINERS + b"tidemark-"
OF_CHANGEFEEDS: Final = (CHANGEFEEDS, PLACEMENTS, MAINTAINERS, DRAINING, _DRAINERS_OF_CHANGEFEEDS)
"""The prefixes of all that is recorded of changefeeds, and of who works for them."""


def capture(capture_id: str) -> bytes:
    """One capture's record, alive as long as its lease."""
    return CAPTURES + capture_id.encode()


def draining(capture_id: str) -> bytes:
    """The key that exists, under the capture's lease, while its tables are moved to
    other captures.
    """
    return DRAINING + capture_id.encode()


def placement(changefeed: str) -> bytes:
    """Which capture is to run a log's changefeed, as the owner has decided."""
    return PLACEMENTS + changefeed.encode()


def maintainer(changefeed: str) -> bytes:
    """Which capture runs a log's changefeed, there with that capture's lease."""
    return MAINTAINERS + changefeed.encode()


def released(changefeed: str) -> bytes:
    """The key that exists for a day after a changefeed was removed; it holds the generation of its
    service safepoint.
    """
    return RELEASED + changefeed.encode()


def info(changefeed: str) -> bytes:
    """One changefeed's record."""
    return INFOS + changefeed.encode()


def status(changefeed: str) -> bytes:
    """One changefeed's checkpoint."""
    return STATUSES + changefeed.encode()


def job(changefeed: str) -> bytes:
    """Why one changefeed's lake job has given up."""
    return JOBS + changefeed.encode()


def readers(changefeed: str) -> bytes:
    """The prefix of the keys of one changefeed's named readers."""
    return READERS + changefeed.encode() + b"/"


def reader(changefeed: str, name: str) -> bytes:
    """The key of a reader's position: the ts up to which it has the changes."""
    return readers(changefeed) + name.encode()


def audit(changefeed: str) -> bytes:
    """The prefix of the keys of one changefeed's audit; itself the key of the time when it last was
    on time.
    """
    return AUDITS + changefeed.encode() + b"/"


def audit_finding(changefeed: str, table: str) -> bytes:
    """The key of an audit's finding about one table."""
    return audit(changefeed) + table.encode()


def schemas(changefeed: str) -> bytes:
    """The prefix of the keys of one changefeed's schema changes."""
    return SCHEMAS + changefeed.encode() + b"/"


def schema_change(changefeed: str, commit_ts: int) -> bytes:
    """One schema change, in the order of commit_ts."""
    return schemas(changefeed) + b"%020d" % commit_ts


def source(changefeed: str) -> bytes:
    """The prefix of the keys of all that its source keeps for one changefeed."""
    return SOURCES + changefeed.encode() + b"/"


def creation(changefeed: str) -> bytes:
    """The key of the request that has made a changefeed: it goes with what the source keeps."""
    return source(changefeed) + b"request"


def request(changefeed: str, request_key: str) -> bytes:
    """The key that exists for a day after a request to change a changefeed was carried out,
    even if the changefeed is gone by then.
    """
    return REQUESTS + changefeed.encode() + b"/" + request_key.encode()


def drainer(changefeed: str) -> bytes:
    """The key under which TiDB's pumps find a changefeed that reads them: an entry beside
    Drainer's, while the changefeed exists.
    """
    return _DRAINERS_OF_CHANGEFEEDS + changefeed.encode()


def schema_table(changefeed: str, commit_ts: int, table_id: int) -> bytes:
    """A table that a schema change brings."""
    return schema_change(changefeed, commit_ts) + b"/%d" % table_id
