"""Every method of PD's service with a wrong cluster, before bootstrap,
and with bytes that are no message.
"""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor

from tests.integration.coordinator.in_process import METHODS, Refusal, coordinator, request_of

ANY_CLUSTER = {
    "GetMembers",
    "GetClusterInfo",
    "StoreGlobalConfig",
    "LoadGlobalConfig",
    "WatchGlobalConfig",
    "GetDCLocationInfo",
    "SyncMaxTS",
    "WatchGCSafePointV2",
}
BEFORE_BOOTSTRAP = ANY_CLUSTER | {
    "Tso",
    "GetMinTS",
    "IsBootstrapped",
    "Bootstrap",
    "AllocID",
    "SetExternalTimestamp",
    "GetExternalTimestamp",
}
PEOPLE = {"GetGCSafePoint"}  # answers an empty request, as a person with grpcurl sends it
CHECKED = [method for method in METHODS if method.name not in ANY_CLUSTER]


def with_header(method: MethodDescriptor, **fields: Any) -> bytes:
    message = request_of(method.name)()
    for name, value in fields.items():
        setattr(message.header, name, value)
    return bytes(message.SerializeToString())


@pytest.mark.parametrize("bootstrapped", [False, True])
async def test_a_request_for_another_cluster_is_refused_by_every_method(
    tmp_path: Path, bootstrapped: bool
) -> None:
    async with coordinator(tmp_path, bootstrapped=bootstrapped) as pd:
        wrong = {
            method.name: await pd.raw(method, with_header(method, cluster_id=5))
            for method in CHECKED
        }
        missing = {
            method.name: await pd.raw(method, b"")
            for method in CHECKED
            if method.name not in PEOPLE
        }
        text = f"mismatch cluster id, need {pd.cluster_id} but got"
    assert wrong == dict.fromkeys(wrong, ("FAILED_PRECONDITION", f"{text} 5"))
    assert missing == dict.fromkeys(missing, ("FAILED_PRECONDITION", f"{text} 0"))


async def test_before_bootstrap_only_what_starts_a_cluster_is_answered(tmp_path: Path) -> None:
    async with coordinator(tmp_path, bootstrapped=False) as pd:
        refused = {
            method.name: await pd.raw(method, with_header(method, cluster_id=pd.cluster_id))
            for method in METHODS
            if method.name not in BEFORE_BOOTSTRAP
        }
        assert refused == dict.fromkeys(
            refused, ("NOT_BOOTSTRAPPED", "cluster is not bootstrapped")
        )
        assert not (await pd.ask("IsBootstrapped")).bootstrapped
        assert (await pd.ask("GetMinTS")).timestamp.physical > 0
        assert (await pd.ask("GetExternalTimestamp")).timestamp == 0


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff\xff", b"\x0a\x7fab", b"\x0b"])
async def test_bytes_that_are_no_message_are_refused_by_every_method(
    tmp_path: Path, garbage: bytes
) -> None:
    async with coordinator(tmp_path) as pd:
        refused = {method.name: await pd.raw(method, garbage) for method in METHODS}
        assert {status for status, _ in refused.values()} == {"INTERNAL"}, refused
        assert not [text for _, text in refused.values() if "class" in text or not text]


def strings_of(method: MethodDescriptor) -> list[FieldDescriptor]:
    return [
        field for field in method.input_type.fields if field.type == FieldDescriptor.TYPE_STRING
    ]


async def test_strings_that_are_no_utf_8_are_refused_by_every_method(tmp_path: Path) -> None:
    answers: dict[str, Refusal] = {}
    async with coordinator(tmp_path) as pd:
        for method in METHODS:
            for field in strings_of(method):
                key = bytes([field.number << 3 | 2, 2])
                answers[f"{method.name}.{field.name}"] = await pd.raw(method, key + b"\xff\xfe")
    assert len(answers) > 5
    assert {status for status, _ in answers.values()} == {"INTERNAL"}, answers


async def test_a_huge_message_is_refused_and_a_large_one_answered(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        get = next(method for method in METHODS if method.name == "GetRegion")
        large = request_of("GetRegion")(
            header=pd.header, region_key=bytes(5 << 20)
        ).SerializeToString()
        assert await pd.raw(get, large) == ("OK", "")
        status, text = await pd.raw(get, large * 4)
        assert (status, "larger than max" in text) == ("RESOURCE_EXHAUSTED", True)
