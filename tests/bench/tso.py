"""Timestamps under load: `python -m tests.bench.tso --streams N --count C`.

Each stream asks for C timestamps a message and waits for the answer before it asks again. `--addr`
and `--pid` as in `tests.bench.safepoint`. Prints one JSON line; `per_s` counts timestamps,
`messages_per_s` answers.
"""

import argparse
import asyncio
import itertools
import json
import resource

from kvproto import pdpb_pb2

from tests.bench.http2 import Load
from tests.bench.target import Target, add_flags, server_of, target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0)
    add_flags(parser)
    arguments = parser.parse_args()
    with target(arguments) as pd:
        print(json.dumps(asyncio.run(_measured(pd, arguments))))


async def _measured(pd: Target, arguments: argparse.Namespace) -> dict[str, object]:
    body = pdpb_pb2.TsoRequest(header=pd.header, count=arguments.count).SerializeToString()
    cpu: list[float] = []
    own: list[float] = []

    async def measure() -> None:
        cpu.append(sum(pd.cpu_s().values()))
        own.append(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))

    load = await Load.run(
        pd.address, "pdpb.PD/Tso", lambda: itertools.repeat(body),
        callers=arguments.streams, seconds=arguments.seconds, streaming=True, measure=measure,
    )  # fmt: skip
    return {
        "name": "tso",
        "server": server_of(arguments),
        "streams": arguments.streams,
        "count": arguments.count,
        "ops": load.calls * arguments.count,
        "seconds": round(load.seconds, 3),
        "per_s": round(load.calls * arguments.count / load.seconds),
        "messages_per_s": round(load.calls / load.seconds),
        "p50_ms": round(load.quantile_ms(0.5), 3),
        "p99_ms": round(load.quantile_ms(0.99), 3),
        "cpu_us_per_message": round((cpu[1] - cpu[0]) / load.calls * 1e6, 1),
        "client_cpu_us_per_message": round((own[1] - own[0]) / load.calls * 1e6, 1),
        "peak_rss_mb": round(pd.rss_mb(), 1),
    }


if __name__ == "__main__":
    main()
