"""Safepoints under load: `python -m tests.bench.safepoint --call update|get --callers N --services
M`.

`update`: each call moves another of M services' safe points, durable in etcd when it is answered;
`get`: what stores poll. Without `--addr` it runs our coordinator on a real etcd, with either
engine; `--addr H:P --pid P` takes a PD that already runs, so that all can be measured one after the
other by the same client. Prints one JSON line; CPU is the server's and etcd's (a PD has its etcd
inside).
"""

import argparse
import asyncio
import itertools
import json
import resource
from collections.abc import Callable, Iterator

from kvproto import pdpb_pb2

from tests.bench.http2 import Load
from tests.bench.target import Target, add_flags, server_of, target

_METHODS = {"update": "pdpb.PD/UpdateServiceGCSafePoint", "get": "pdpb.PD/GetGCSafePoint"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--call", choices=_METHODS, default="update")
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--services", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0)
    add_flags(parser)
    arguments = parser.parse_args()
    with target(arguments) as pd:
        if arguments.call == "update":
            asyncio.run(_register(pd, arguments.services))
        result = asyncio.run(_measured(pd, arguments))
        if arguments.call == "update":
            _check(pd)
    print(json.dumps(result))


async def _register(pd: Target, services: int) -> None:
    """Let every service be known before the clock runs."""
    known = itertools.count()
    await Load.run(
        pd.address, _METHODS["update"], lambda: (_update(pd, next(known) % services, 1000) for _ in itertools.count()),
        callers=64, seconds=max(0.5, services / 500),
    )  # fmt: skip


async def _measured(pd: Target, arguments: argparse.Namespace) -> dict[str, object]:
    cpu: list[dict[str, float]] = []
    own: list[float] = []

    async def measure() -> None:
        cpu.append(pd.cpu_s())
        own.append(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))

    load = await Load.run(
        pd.address, _METHODS[arguments.call], _bodies(pd, arguments),
        callers=arguments.callers, seconds=arguments.seconds, measure=measure,
    )  # fmt: skip
    used = {name: (cpu[1][name] - cpu[0][name]) / load.calls * 1e6 for name in pd.pids}
    return {
        "name": f"safepoint_{arguments.call}",
        "server": server_of(arguments),
        "callers": arguments.callers,
        "services": arguments.services,
        "ops": load.calls,
        "seconds": round(load.seconds, 3),
        "per_s": round(load.calls / load.seconds),
        "p50_ms": round(load.quantile_ms(0.5), 3),
        "p99_ms": round(load.quantile_ms(0.99), 3),
        "cpu_us_per_op": round(sum(used.values()), 1),
        **{f"{name}_cpu_us_per_op": round(value, 1) for name, value in used.items()},
        "client_cpu_us_per_op": round((own[1] - own[0]) / load.calls * 1e6, 1),
        "peak_rss_mb": round(pd.rss_mb(), 1),
    }


def _bodies(pd: Target, arguments: argparse.Namespace) -> Callable[[], Iterator[bytes]]:
    if arguments.call == "get":
        body = pdpb_pb2.GetGCSafePointRequest(header=pd.header).SerializeToString()
        return lambda: itertools.repeat(body)
    number = itertools.count(1)

    def bodies() -> Iterator[bytes]:
        while True:
            step = next(number)
            yield _update(pd, step % arguments.services, 1000 + step)

    return bodies


def _update(pd: Target, service: int, safe_point: int) -> bytes:
    return pdpb_pb2.UpdateServiceGCSafePointRequest(
        header=pd.header, service_id=b"bench-%d" % service, TTL=3600, safe_point=safe_point
    ).SerializeToString()


def _check(pd: Target) -> None:
    """The load did move what it asked to move."""
    with pd.stub() as stub:
        request = pdpb_pb2.UpdateServiceGCSafePointRequest(
            header=pd.header, service_id=b"gc_worker", TTL=(1 << 63) - 1
        )
        answer = stub.UpdateServiceGCSafePoint(request)
    assert not answer.header.HasField("error"), answer


if __name__ == "__main__":
    main()
