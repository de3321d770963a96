"""Timestamps that others decide: the external one, and what stores have resolved."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from storage.model.ts import compose
from tests.integration.coordinator.in_process import Pd, coordinator, refusal

FUTURE = "the external timestamp should not be larger than global ts"
BACK = "the external timestamp should be larger than current external timestamp"


async def external(pd: Pd) -> int:
    return int((await pd.ask("GetExternalTimestamp")).timestamp)


async def test_the_external_timestamp_only_grows_and_never_passes_the_newest(
    tmp_path: Path,
) -> None:
    async with coordinator(tmp_path) as pd:
        newest = (await pd.ask("GetMinTS")).timestamp
        now = compose(newest.physical, newest.logical)
        for asked, refused in [
            (0, ("INVALID_VALUE", BACK)),
            (100, ("OK", "")),
            (100, ("INVALID_VALUE", BACK)),
            (99, ("INVALID_VALUE", BACK)),
            (now, ("OK", "")),
            (now + compose(60_000), ("INVALID_VALUE", FUTURE)),
            ((1 << 64) - 1, ("INVALID_VALUE", FUTURE)),
        ]:
            assert await refusal(pd.ask("SetExternalTimestamp", timestamp=asked)) == refused
        assert await external(pd) == now
    async with coordinator(tmp_path) as pd:
        assert await external(pd) == now


async def test_of_racing_external_timestamps_the_largest_stays(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        await asyncio.gather(
            *(refusal(pd.ask("SetExternalTimestamp", timestamp=ts)) for ts in (5, 9, 3, 7))
        )
        assert await external(pd) == 9


async def test_the_external_timestamp_waits_for_a_cluster(tmp_path: Path) -> None:
    async with coordinator(tmp_path, bootstrapped=False) as pd:
        status, text = await refusal(pd.ask("SetExternalTimestamp", timestamp=5))
        assert (status, "not bootstrapped" in text) == ("INVALID_VALUE", True)


async def test_resolved_timestamps_are_taken_from_known_stores(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        assert await refusal(pd.ask("ReportMinResolvedTS", store_id=1, min_resolved_ts=5)) == (
            "OK",
            "",
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pd.ask("ReportMinResolvedTS", store_id=77, min_resolved_ts=5)
        assert refused.value.code() is grpc.StatusCode.UNKNOWN
        assert refused.value.details() == "[PD:core:ErrStoreNotFound]store 77 not found"


async def test_data_centres_have_no_timestamps_of_their_own(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        for method in ("GetDCLocationInfo", "SyncMaxTS"):
            assert (await pd.ask(method)).header.cluster_id == pd.cluster_id
