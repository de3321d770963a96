"""A process that moves money through the Rust client:
`python -m tests.integration.store.teller ADDR MODE SEED`.
"""

import asyncio
import contextlib
import os
import random
import sys
from typing import Any

from tests.integration.store.stubs import row_key

ACCOUNTS = [row_key(table, handle) for table in (101, 102) for handle in (1000, 1001, 1002)]
TRANSFERS = 60


def transfer(txn: Any, rng: random.Random, *, pessimistic: bool) -> None:
    source, target = rng.sample(ACCOUNTS, 2)
    get = txn.get_for_update if pessimistic else txn.get
    first, second = int(get(source)), int(get(target))
    txn.put(source, b"%d" % (first - 1))
    txn.put(target, b"%d" % (second + 1))
    txn.commit()


def main(address: str, mode: str, seed: str) -> int:
    from tikv_client import TransactionClient

    asyncio.set_event_loop(asyncio.new_event_loop())
    client, rng, committed = TransactionClient.connect([address]), random.Random(int(seed)), 0
    for _ in range(TRANSFERS):
        txn = client.begin(pessimistic=mode == "pessimistic")
        try:
            transfer(txn, rng, pessimistic=mode == "pessimistic")
            committed += 1
        except Exception:  # noqa: BLE001 - conflicts and lock waits, which the client throws as plain exceptions
            with contextlib.suppress(Exception):
                txn.rollback()
    return committed


if __name__ == "__main__":
    print(main(*sys.argv[1:]), flush=True)
    os._exit(0)  # the client's threads crash an interpreter that ends by itself
