"""Lookups, scans and heartbeats of regions at their edges,
as PD answers them (observed on PD of August 2026).
"""

from pathlib import Path
from typing import Any

import pytest
from kvproto import metapb_pb2, pdpb_pb2

from tests.integration.coordinator.in_process import Pd, Refusal, coordinator, refusal, region

LEFT, RIGHT = region(20, b"", b"m", 2), region(2, b"m", b"", 2)
SMALLEST = b"\0" * 8 + b"\xf7"  # the encoded empty key: how client-go asks from the start


async def ids(pd: Pd, method: str, **fields: Any) -> list[int]:
    answer = await pd.ask(method, **fields)
    assert not answer.header.HasField("error"), answer
    return [one.region.id for one in answer.regions]


async def test_a_scans_limit_of_0_or_less_is_none(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        await pd.heartbeat(LEFT, RIGHT)
        for limit, found in [
            (0, [20, 2]),
            (-1, [20, 2]),
            (1, [20]),
            (2, [20, 2]),
            ((1 << 31) - 1, [20, 2]),
        ]:
            assert await ids(pd, "ScanRegions", limit=limit) == found
            assert await ids(pd, "ScanRegions", start_key=SMALLEST, limit=limit) == found
            assert (
                await ids(pd, "BatchScanRegions", ranges=[pdpb_pb2.KeyRange()], limit=limit)
                == found
            )
        assert await ids(pd, "ScanRegions", start_key=b"z", end_key=b"a", limit=9) == []
        assert await ids(pd, "ScanRegions", start_key=b"n", end_key=b"n", limit=9) == [2]
        answer = await pd.ask("ScanRegions", limit=9)
        assert [one.id for one in answer.region_metas] == [20, 2]
        assert [one.id for one in answer.leaders] == [120, 102]


def ranges(*pairs: tuple[bytes, bytes]) -> list[pdpb_pb2.KeyRange]:
    return [pdpb_pb2.KeyRange(start_key=start, end_key=end) for start, end in pairs]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ([(b"a", b"n"), (b"b", b"")], "invalid key range, ranges overlapped"),
        ([(b"a", b""), (b"b", b"c")], "invalid key range, ranges overlapped"),
        ([(b"n", b"b")], "invalid key range, start key > end key"),
    ],
)
async def test_ranges_of_a_batch_scan_are_in_order(
    tmp_path: Path, asked: list[tuple[bytes, bytes]], text: str
) -> None:
    async with coordinator(tmp_path) as pd:
        assert await refusal(pd.ask("BatchScanRegions", ranges=ranges(*asked))) == ("UNKNOWN", text)


async def test_a_batch_scan_has_each_region_once_and_says_when_it_has_a_hole(
    tmp_path: Path,
) -> None:
    async with coordinator(tmp_path) as pd:
        await pd.heartbeat(LEFT, region(2, b"n", b"t", 2))
        assert await ids(pd, "BatchScanRegions") == []
        assert await ids(
            pd, "BatchScanRegions", ranges=ranges((b"", b"a"), (b"b", b"c"), (b"d", b""))
        ) == [20, 2]
        for start, end, whole in [
            (b"a", b"m", True),
            (b"a", b"n", False),
            (b"n", b"", False),
            (b"o", b"t", True),
        ]:
            asked = ranges((start, end))
            status, _ = await refusal(
                pd.ask("BatchScanRegions", ranges=asked, contain_all_key_range=True)
            )
            assert status == ("OK" if whole else "REGIONS_NOT_CONTAIN_ALL_KEY_RANGE")
        limited = ranges((b"", b"n"))
        assert await ids(
            pd, "BatchScanRegions", ranges=limited, contain_all_key_range=True, limit=1
        ) == [20]


async def test_what_no_region_holds_is_an_answer_without_one(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        await pd.heartbeat(LEFT, RIGHT)
        for method, fields in [
            ("GetPrevRegion", {"region_key": b"a"}),
            ("GetRegionByID", {"region_id": 0}),
            ("GetRegionByID", {"region_id": (1 << 64) - 1}),
        ]:
            answer = await pd.ask(method, **fields)
            assert (answer.header.HasField("error"), answer.HasField("region")) == (False, False)
        asked = pdpb_pb2.QueryRegionRequest(
            header=pd.header, keys=[b"a", b"z"], prev_keys=[b"a", b"z"], ids=[2, 99, 0]
        )
        nothing = pdpb_pb2.QueryRegionRequest(header=pd.header)
        full, empty = await pd.stream("QueryRegion", [asked, nothing])
    assert (list(full.key_id_map), list(full.prev_key_id_map)) == ([20, 2], [0, 20])
    assert sorted(full.regions_by_id) == [2, 20]
    assert full.regions_by_id[2].leader.id == 102
    assert not empty.regions_by_id


async def refusals(
    pd: Pd, *regions: metapb_pb2.Region, leader: metapb_pb2.Peer | None = None
) -> list[Refusal]:
    answers = await pd.heartbeat(*regions, leader=leader)
    return [
        (pdpb_pb2.ErrorType.Name(one.header.error.type), one.header.error.message)
        for one in answers
    ]


@pytest.mark.parametrize(
    "broken",
    [
        region(0),
        metapb_pb2.Region(id=9, region_epoch=metapb_pb2.RegionEpoch(version=9)),
        metapb_pb2.Region(id=9, peers=region().peers),
        region(9, b"z", b"a", 9),
        region(9, b"a", b"a", 9),
    ],
)
async def test_what_cannot_be_a_region_is_refused_and_the_others_are_taken(
    tmp_path: Path, broken: metapb_pb2.Region
) -> None:
    async with coordinator(tmp_path) as pd:
        ((status, text),) = await refusals(
            pd, LEFT, broken, RIGHT, leader=metapb_pb2.Peer(id=120, store_id=1)
        )
        assert (status, text.split(",")[0]) == ("UNKNOWN", "invalid request region")
        assert await ids(pd, "ScanRegions") == [20, 2]


async def test_a_stale_report_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        ((status, text),) = await refusals(pd, LEFT, RIGHT, region(2))
        assert status == "UNKNOWN"
        assert text.startswith("region is stale: region id: 2 ")
        assert "origin id: 2 " in text
        assert await ids(pd, "ScanRegions") == [20, 2]


async def test_reports_of_unknown_stores_end_the_stream(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        for leader, number in [(metapb_pb2.Peer(), 0), (metapb_pb2.Peer(id=3, store_id=77), 77)]:
            requests = [
                pdpb_pb2.RegionHeartbeatRequest(header=pd.header, region=LEFT, leader=leader)
            ]
            ended = await refusal(pd.stream("RegionHeartbeat", requests))
            assert ended == ("UNKNOWN", f"invalid store ID {number}, not found")
        assert await ids(pd, "ScanRegions") == [2]
