"""Metadata of this process, and a PostgreSQL."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from storage.meta.client import EtcdMeta
from tests.integration.mysql.replica import embedded_meta
from tests.postgres import PostgreSql, running_postgres


@pytest.fixture
async def meta(tmp_path: Path) -> AsyncIterator[EtcdMeta]:
    async with embedded_meta(tmp_path / "meta") as opened:
        yield opened


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgreSql]:
    with running_postgres() as server:
        yield server
