"""A process with gRPC calls under way can start other programs,
also when Python runs between fork and exec.
"""

import subprocess
import sys

_BUSY = """
import asyncio, subprocess, sys
import server
import grpc

async def main():
    listening = grpc.aio.server()
    port = listening.add_insecure_port("127.0.0.1:0")
    await listening.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/none/None")

        async def calls():
            while True:
                try:
                    await call(b"")
                except grpc.aio.AioRpcError:
                    pass

        def child():
            return subprocess.run(["true"], preexec_fn=lambda: None, check=False).returncode

        calling = [asyncio.create_task(calls()) for _ in range(4)]
        codes = [await asyncio.to_thread(child) for _ in range(40)]
        for task in calling:
            task.cancel()
    await listening.stop(0)
    sys.exit(any(codes))

asyncio.run(main())
"""


def test_a_busy_process_forks_without_crashing_its_children():
    done = subprocess.run(
        [sys.executable, "-c", _BUSY], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
