"""Which files of an Iceberg table in a directory are made durable after a commit, and what its
properties of ours may say.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.iceberg.catalog import COLUMN_IDS, NEWEST_CUT, recorded_as
from pyspark_tidemark.lake.iceberg.java_catalog import settle

COMMIT = "5b371155-cadb-43ae-b884-fc0797131c40"


@pytest.fixture
def metadata(tmp_path):
    """That of a table with ten versions and one snapshot."""
    directory = tmp_path / "bank" / "t" / "metadata"
    directory.mkdir(parents=True)
    names = [f"v{number}.metadata.json" for number in range(1, 11)]
    names += [
        f"snap-7-1-{COMMIT}.avro",
        f"{COMMIT}-m0.avro",
        f"{COMMIT}-m3.avro",
        "another-m0.avro",
    ]
    for name in names:
        (directory / name).touch()
    return directory


@pytest.fixture
def synced(monkeypatch):
    found, fsync = set(), os.fsync

    def noted(descriptor):
        found.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return found


def test_the_newest_version_and_all_of_its_commit(metadata, synced):
    (metadata / "version-hint.text").write_text("9")
    settle(metadata.parent, metadata / f"snap-7-1-{COMMIT}.avro")
    files = {"version-hint.text", "v9.metadata.json", f"snap-7-1-{COMMIT}.avro"}
    files |= {f"{COMMIT}-m0.avro", f"{COMMIT}-m3.avro"}
    assert synced == files | {"metadata", "t", "bank", metadata.parents[2].name}


@pytest.mark.parametrize("hint", [None, "", "12", "no number"])
def test_without_a_hint_that_can_be_used_the_newest_version_is_looked_for(metadata, synced, hint):
    """Iceberg does without it, too."""
    if hint is not None:
        (metadata / "version-hint.text").write_text(hint)
    settle(metadata.parent, None)
    assert "v10.metadata.json" in synced
    assert "v9.metadata.json" not in synced


def test_metadata_that_is_compressed(metadata, synced):
    (metadata / "version-hint.text").write_text("11")
    (metadata / "v11.gz.metadata.json").touch()
    settle(metadata.parent, None)
    assert "v11.gz.metadata.json" in synced


@pytest.mark.parametrize(
    ("name", "parse", "text"), [(NEWEST_CUT, int, "x"), (COLUMN_IDS, json.loads, "{")]
)
def test_a_property_of_ours_that_somebody_else_has_changed_is_named(name, parse, text):
    table = SimpleNamespace(name=lambda: "bank.t", properties=lambda: {name: text})
    with pytest.raises(SourceError, match=rf"ErrTargetForeign.*bank\.t has the property {name} ="):
        recorded_as(table, name, parse)
    assert recorded_as(SimpleNamespace(properties=dict), name, parse) is None
