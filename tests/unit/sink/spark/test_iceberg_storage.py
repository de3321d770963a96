"""What opens an Iceberg table's files in S3: Iceberg's settings as pyarrow's, errors with codes,
and shares of files, each row group in exactly one.
"""

import pickle
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from py4j.protocol import Py4JError
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.iceberg import files, storage
from pyspark_tidemark.lake.iceberg.storage import Storage, s3_arguments, storage_of

KEYS = {"s3.access-key-id": "AKIA", "s3.secret-access-key": "s3cret"}


def java_map(of):
    keys = SimpleNamespace(toArray=lambda: list(of))
    return SimpleNamespace(keySet=lambda: keys, get=of.get)


class LendingIo:
    def __init__(self, **lent):
        self._lent = lent

    def properties(self):
        return java_map(KEYS | {"client.region": "eu-central-1"})

    def credentials(self):
        lent = [
            SimpleNamespace(
                prefix=lambda prefix=prefix: prefix, config=lambda of=config: java_map(of)
            )
            for prefix, config in self._lent.items()
        ]
        return SimpleNamespace(toArray=lambda: lent)


class PlainIo(LendingIo):
    def credentials(self):
        raise Py4JError("Method credentials([]) does not exist")


def table(io):
    return SimpleNamespace(io=lambda: io)


def test_settings_of_iceberg_become_arguments_of_pyarrow():
    endpoint = {"s3.endpoint": "http://minio:9000/", "s3.path-style-access": "true"}
    assert dict(s3_arguments(KEYS | endpoint | {"s3.region": "a", "client.region": "b"})) == {
        "access_key": "AKIA",
        "secret_key": "s3cret",
        "region": "b",
        "scheme": "http",
        "endpoint_override": "minio:9000",
        "force_virtual_addressing": False,
    }
    assert s3_arguments({}) == (), "the environment says everything"
    assert dict(s3_arguments({"s3.endpoint": "host"}))["scheme"] == "https"
    role = s3_arguments(KEYS | {"client.assume-role.arn": "arn:aws:iam::1:role/lake"})
    assert dict(role) == {"role_arn": "arn:aws:iam::1:role/lake"}


@pytest.mark.parametrize(
    "setting",
    [
        {"s3.sse.type": "kms"},
        {"s3.remote-signing-enabled": "true"},
        {"s3.acl": "public-read"},
        {"client.credentials-provider": "com.example.Provider"},
    ],
)
def test_what_tasks_cannot_keep_is_refused_by_name(setting):
    with pytest.raises(SourceError, match=f"ErrTargetUnusable.*{next(iter(setting))}"):
        s3_arguments(KEYS | setting)
    assert s3_arguments({"s3.sse.type": "none", "s3.remote-signing-enabled": "false"}) == ()


def test_credentials_are_those_lent_for_the_longest_prefix_and_never_shown():
    lent = LendingIo(
        **{
            "s3://lake": {"s3.access-key-id": "whole"},
            "s3://lake/a": {"s3.access-key-id": "part", "s3.session-token": "t0ken"},
            "s3://other": {"s3.access-key-id": "other"},
        }
    )
    found = storage_of(table(lent), "s3://lake/a/data")
    assert dict(found.s3)["access_key"] == "part"
    assert found.is_lent
    assert "s3cret" not in repr(found) + str(found)
    assert pickle.loads(pickle.dumps(found)) == found
    plain = storage_of(table(PlainIo()), "s3a://lake/a/data")
    assert dict(plain.s3)["access_key"] == "AKIA"
    assert not plain.is_lent


@pytest.mark.parametrize("place", ["/lake/data", "file:/lake", "hdfs://nn/lake", "viewfs://c/lake"])
def test_disks_and_hdfs_need_no_settings(place):
    assert storage_of(None, place) == Storage()


@pytest.mark.parametrize("place", ["gs://bucket/t", "abfss://c@a.dfs.core.windows.net/t"])
def test_other_object_stores_are_refused(place):
    with pytest.raises(SourceError, match=f"ErrTargetUnusable.*{place}"):
        storage_of(None, place)


@pytest.mark.parametrize(
    ("text", "code", "is_retryable"),
    [
        ("When reading: AWS Error ACCESS_DENIED during HeadObject", "ErrCredentials", False),
        ("AWS Error INVALID_ACCESS_KEY_ID", "ErrCredentials", False),
        ("AWS Error UNKNOWN (HTTP status 400): ExpiredToken", "ErrTargetUnavailable", True),
        ("AWS Error NO_SUCH_BUCKET during PutObject", "ErrTargetUnusable", False),
        ("AWS Error NETWORK_CONNECTION: connection refused", "ErrTargetUnavailable", True),
    ],
)
def test_errors_of_s3_have_codes(text, code, is_retryable):
    with (
        pytest.raises(SourceError, match=code) as caught,
        Storage().errors_named("s3://lake/t/data/f.parquet"),
    ):
        raise OSError(text)
    assert caught.value.retryable is is_retryable


def test_errors_of_disks_stay_what_they_are():
    with pytest.raises(OSError, match="No space left"), Storage().errors_named("/lake/f.parquet"):
        raise OSError("No space left on device")


@given(rows=st.lists(st.integers(1, 50), max_size=20), of=st.integers(1, 30))
def test_each_row_group_is_in_exactly_one_share(rows, of):
    metadata = SimpleNamespace(
        num_rows=sum(rows),
        num_row_groups=len(rows),
        row_group=lambda group: SimpleNamespace(num_rows=rows[group]),
    )
    parts = [files._row_groups(metadata, files.Share("f", 1, number, of)) for number in range(of)]
    assert [group for groups, _ in parts for group in groups] == list(range(len(rows)))
    assert all(first == sum(rows[: groups[0]]) for groups, first in parts if groups)


def test_large_files_are_read_by_several_tasks():
    whole = files.Share("f", 1, 0, 1)
    assert files.shares(whole, 10) == [whole]
    parts = files.shares(whole, 3 * files.SHARE_BYTES + 1)
    assert [(share.number, share.of) for share in parts] == [(0, 3), (1, 3), (2, 3)]


def test_one_client_for_each_set_of_credentials():
    arguments = s3_arguments(KEYS | {"client.region": "eu-central-1"})
    assert storage._s3_file_system(arguments) is storage._s3_file_system(arguments)
    system, path = Storage(arguments).open("s3a://lake/t/data")
    assert (system.type_name, path) == ("s3", "lake/t/data")


def with_id(name, kind, number):
    return pa.field(name, kind, metadata={b"PARQUET:field_id": str(number).encode()})


def test_columns_are_read_by_id_whatever_the_file_calls_them_and_as_they_are_typed_now(tmp_path):
    stored = pa.schema([with_id("old.name", pa.int32(), 3), with_id("gone", pa.string(), 4)])
    path, keys = str(tmp_path / "f.parquet"), list(range(10))
    written = pa.table([pa.array(keys, pa.int32()), pa.array(["x"] * 10)], schema=stored)
    pq.write_table(written, path, row_group_size=3)
    added = with_id("added", pa.decimal128(10, 2), 9)
    fields = pa.schema([added, with_id("name", pa.int64(), 3)])
    assert files.read_columns(Storage(), path, fields).to_pydict() == {
        "added": [None] * 10,
        "name": keys,
    }
    parts = pa.RecordBatch.from_pylist(
        [
            {"location": path, "sequence": 7, "number": number, "of": 2, "vector": None}
            for number in range(2)
        ]
    )
    origin = files.Origin("_sequence", "_file", "_position")
    rows = pa.Table.from_batches(files.rows_of_shares(Storage(), fields, origin)(iter([parts])))
    assert rows["name"].to_pylist() == keys
    assert set(rows["_sequence"].to_pylist()) == {7}
    assert set(rows["_file"].to_pylist()) == {path}
    assert rows["_position"].to_pylist() == keys
    only_added = files.rows_of_shares(Storage(), pa.schema([added]), files.Origin())(iter([parts]))
    assert sum(batch.num_rows for batch in only_added) == len(keys)
