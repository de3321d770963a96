"""A simulation in a process of its own, where names are walked in the same order each time."""

import os
import subprocess
import sys


def simulate(module: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE FLAGS`."""
    command = [sys.executable, "-W", "ignore", "-m", module, *flags]
    environment = os.environ | {
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join((".", "proto/gen", "sink/spark")),
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
