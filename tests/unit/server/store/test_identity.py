"""What a store knows of itself."""

import pytest

from server.store.identity import load_identity
from storage.model.errors import CorruptError
from tests.memory_kv import MemoryKV


class Pd:
    cluster_id = 7
    address = "pd:2379"

    def __init__(self):
        self._last_id = 0

    async def alloc_id(self):
        self._last_id += 1
        return self._last_id

    async def is_bootstrapped(self):
        return True


async def test_an_identity_of_a_later_build_is_refused_by_its_format():
    kv, pd = MemoryKV(), Pd()
    first = await load_identity(kv, pd, [])
    assert (await load_identity(kv, pd, [])).store_id == first.store_id
    pairs = {
        key: value.replace(b'{"format": 1, "cluster', b'{"format": 2, "cluster')
        for key, value in kv.scan(b"")
    }
    with pytest.raises(CorruptError, match="identity has format 2; this program knows 1"):
        await load_identity(MemoryKV(pairs), pd, [])
