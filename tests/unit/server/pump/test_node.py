import os
from pathlib import Path

import pytest

from server.pump.registry import Node, node_id


def test_the_registry_entry_is_the_one_of_the_original() -> None:
    node = Node("vm:21050", "127.0.0.1:21050", "online")
    assert node.record(max_commit_ts=12, update_ts=34) == (
        b'{"nodeId":"vm:21050","host":"127.0.0.1:21050","state":"online","isAlive":false,"score":0,"label":null,'
        b'"maxCommitTS":12,"updateTS":34}'
    )


def test_a_node_keeps_its_name_unless_given_another(tmp_path: Path) -> None:
    first = node_id(tmp_path, "", "127.0.0.1:8250")
    assert first.endswith(":8250")
    assert node_id(tmp_path, "", "127.0.0.1:9999") == first
    assert node_id(tmp_path, "pump-1", "127.0.0.1:9999") == "pump-1"
    assert node_id(tmp_path, "", "127.0.0.1:1") == "pump-1"


def test_a_name_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    node_id(tmp_path, "pump-1", "127.0.0.1:8250")
    monkeypatch.setattr(os, "fsync", full)
    assert node_id(tmp_path, "pump-1", "127.0.0.1:8250") == "pump-1"
    with pytest.raises(OSError, match="No space"):
        node_id(tmp_path, "pump-2", "127.0.0.1:8250")
    assert node_id(tmp_path, "", "127.0.0.1:8250") == "pump-1"
