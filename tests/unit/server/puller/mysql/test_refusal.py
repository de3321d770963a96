"""What servers were seen to answer (MariaDB 10.11, MySQL 8.0 and 9.7),
and which error of ours it becomes.
"""

import pytest

from server.puller.mysql.session.errors import (
    LogBehindError,
    LogPurgedError,
    LogRefusedError,
    MySqlLoginError,
    MySqlPrivilegeError,
    MySqlTlsError,
    MySqlUnavailableError,
    ServerIdTakenError,
    of_packet,
    refusal,
)
from storage.model.errors import TidemarkError


@pytest.mark.parametrize(
    ("number", "text", "expected"),
    [
        (1236, "Could not find first log file name in binary log index file", LogPurgedError),
        (
            1236,
            (
                "Cannot replicate because the source purged required binary logs. Replicate the "
                "missing"
            ),
            LogPurgedError,
        ),
        (
            1236,
            "Client requested source to start replication from position > file size; the first",
            LogBehindError,
        ),
        (
            1236,
            "Replica has more GTIDs than the source has, using the source's SERVER_UUID.",
            LogBehindError,
        ),
        (1236, "something else", LogRefusedError),
        (
            1236,
            "A replica with the same server_uuid/server_id as this replica has connected",
            ServerIdTakenError,
        ),
        (1045, "Access denied for user", MySqlLoginError),
        (
            3159,
            (
                "Connections using insecure transport are prohibited while "
                "--require_secure_transport=ON."
            ),
            MySqlTlsError,
        ),
        (
            1227,
            "Access denied; you need (at least one of) the REPLICATION SLAVE privilege(s)",
            MySqlPrivilegeError,
        ),
        (1053, "Server shutdown in progress", MySqlUnavailableError),
    ],
)
def test_each_answer_has_its_error(number: int, text: str, expected: type[TidemarkError]) -> None:
    assert type(refusal(number, text, "doing it")) is expected
    packet = b"\xff" + number.to_bytes(2, "little") + b"#HY000" + text.encode()
    assert type(of_packet(packet, "doing it")) is expected
