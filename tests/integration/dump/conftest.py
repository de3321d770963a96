"""Metadata of this process for the dumps under test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from storage.meta.client import EtcdMeta
from tests.integration.mysql.replica import embedded_meta


@pytest.fixture
async def meta(tmp_path: Path) -> AsyncIterator[EtcdMeta]:
    async with embedded_meta(tmp_path / "meta") as opened:
        yield opened
