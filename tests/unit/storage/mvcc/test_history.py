"""The incremental scan: every change after the checkpoint once, with what it replaced;
open locks as prewrites.
"""

from hypothesis import given
from hypothesis import strategies as st

from storage.codec import encode_bytes
from storage.mvcc.change_feed import changes_since
from storage.mvcc.engine import COMMITTED, PREWRITE, Change
from storage.mvcc.record import DELETE, PUT
from tests.unit.storage.mvcc.histories import TXNS, History, played


@given(TXNS.map(played), st.integers(0, 160), st.booleans())
def test_the_scan_tells_the_history_after_the_checkpoint(
    history: History, checkpoint_ts: int, old_values: bool
) -> None:
    def change(
        event: int, key: bytes, start_ts: int, commit_ts: int, value: bytes | None
    ) -> Change:
        before = (history.value(key, (commit_ts or 10**6) - 1) or b"") if old_values else b""
        op = DELETE if value is None else PUT
        return Change(event, key, encode_bytes(key), op, start_ts, commit_ts, value or b"", before)

    wanted = [
        change(PREWRITE, key, start_ts, 0, value)
        for key, (start_ts, value) in sorted(history.open.items())
    ]
    for key, versions in sorted(history.versions.items()):
        later = [version for version in versions if version[1] > checkpoint_ts]
        wanted += [
            change(COMMITTED, key, start, commit, value) for start, commit, value in reversed(later)
        ]
    assert (
        list(changes_since(history.engine.kv, b"", b"", checkpoint_ts, old_values=old_values))
        == wanted
    )
