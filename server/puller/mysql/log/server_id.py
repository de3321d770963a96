"""The id under which a server knows us as a reader of its log: leased,
so that no two of us have the same one.

Two readers with one id evict each other for ever (error 4052). The ids of real servers are not in
the metadata, so random ones are taken from the upper half of their range, which installations do
not use.
"""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from storage.meta.meta import Compare, Meta, Put

ROOT: Final = b"/tidemark/default/mysql/server-id/"
_TTL_S = 30
_RANGE = (1 << 31, (1 << 32) - 2)


def any_server_id() -> int:
    """One that is probably nobody's."""
    return random.randint(*_RANGE)  # noqa: S311 - it keeps nothing secret


@asynccontextmanager
async def leased_server_id(meta: Meta, changefeed: str, fixed: int = 0) -> AsyncIterator[int]:
    """An id that is ours for the block; `fixed` is what the operator wants, 0 for any.

    Raises:
        MetaUnavailableError: nobody answers.
    """
    if fixed:
        yield fixed
        return
    async with await meta.grant_lease(_TTL_S) as lease:
        while True:
            number = any_server_id()
            key = ROOT + b"%010d" % number
            if (
                await meta.txn([Compare.absent(key)], [Put(key, changefeed.encode(), lease.id)])
            ).succeeded:
                yield number
                return
