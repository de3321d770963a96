"""What a worker has in its capture's data directory:
`run/N.control` and `run/N.flight`, `sorter/worker-N/`.
"""

import os
from pathlib import Path
from typing import Final

from server.capture.directory import DataDirError

_SOCKET_PATH_BYTES_MAX: Final = 107  # Linux


def control_socket(directory: Path, number: int) -> str:
    """Where a worker listens for its capture's calls."""
    return f"unix:{directory}/run/{number}.control"


def flight_socket(directory: Path, number: int) -> str:
    """Where a worker hands out rows to its capture."""
    return f"unix:{directory}/run/{number}.flight"


def sorter_directory(directory: Path, number: int) -> Path:
    """Where a worker keeps its sorted rows, by changefeed."""
    return directory / "sorter" / f"worker-{number}"


def make_sockets_directory(directory: Path, workers: int) -> None:
    """Make the place of the sockets, for this user only.

    Raises:
        DataDirError: the path is too long for Unix sockets.
    """
    longest = control_socket(directory, workers).removeprefix("unix:")
    if len(os.fsencode(longest)) > _SOCKET_PATH_BYTES_MAX:
        raise DataDirError(
            f"the path {directory} is too long for the Unix sockets of workers; choose a shorter "
            "--data-dir"
        )
    (directory / "run").mkdir(mode=0o700, exist_ok=True)
    (directory / "run").chmod(0o700)
