"""What is reported of splits, and schedulers that have nothing to do: each region has one copy."""

from pathlib import Path
from typing import Any

import pytest
from kvproto import metapb_pb2

from tests.integration.coordinator.in_process import coordinator, refusal, region


@pytest.mark.parametrize(
    "regions",
    [
        [],
        [region()],
        [region(8, b"", b"a", 2), region(9, b"b", b"", 2)],
        [region(8, b"z", b"a", 2)] * 2,
    ],
)
async def test_a_report_that_is_no_split_changes_nothing(
    tmp_path: Path, regions: list[metapb_pb2.Region]
) -> None:
    async with coordinator(tmp_path) as pd:
        assert await refusal(pd.ask("ReportBatchSplit", regions=regions)) == (
            "UNKNOWN",
            "invalid split region",
        )
        assert [one.region.id for one in (await pd.ask("ScanRegions")).regions] == [2]


async def test_a_split_is_known_as_soon_as_it_is_reported(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        answer = await pd.ask(
            "ReportBatchSplit", regions=[region(8, b"", b"m", 2), region(2, b"m", b"", 2)]
        )
        assert not answer.header.HasField("error")
        assert (await pd.ask("GetRegion", region_key=b"a")).region.id == 8


@pytest.mark.parametrize(
    ("method", "fields", "refused"),
    [
        ("ScatterRegion", {}, ("REGION_NOT_FOUND", "region 0 not found")),
        ("ScatterRegion", {"region_id": 99}, ("REGION_NOT_FOUND", "region 99 not found")),
        ("ScatterRegion", {"region_id": 2}, ("OK", "")),
        ("ScatterRegion", {"region": region(99)}, ("OK", "")),
        ("GetOperator", {"region_id": 2}, ("REGION_NOT_FOUND", "Not Found")),
        ("SplitRegions", {}, ("OK", "")),
        ("SplitRegions", {"split_keys": [b""]}, ("OK", "")),
        ("SplitAndScatterRegions", {}, ("UNKNOWN", "[PD:scatter:ErrEmptyRegion]empty region")),
    ],
)
async def test_schedulers_answer_as_if_they_were_done(
    tmp_path: Path, method: str, fields: Any, refused: tuple[str, str]
) -> None:
    async with coordinator(tmp_path) as pd:
        assert await refusal(pd.ask(method, **fields)) == refused


async def test_scattering_several_regions_names_those_that_are_unknown(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        answer = await pd.ask("ScatterRegion", regions_id=[99, 2, 98, 2], retry_limit=1)
        assert (answer.finished_percentage, list(answer.failed_regions_id)) == (50, [99, 98])


async def test_a_store_that_does_not_answer_leaves_its_keys_unsplit(tmp_path: Path) -> None:
    async with coordinator(tmp_path, bootstrapped=False) as pd:
        nobody = metapb_pb2.Store(id=1, address="127.0.0.1:1", version="8.5.0")
        await pd.ask("Bootstrap", store=nobody, region=region())
        answer = await pd.ask("SplitRegions", split_keys=[b"m"], retry_limit=1)
        assert (answer.finished_percentage, list(answer.regions_id)) == (0, [])
