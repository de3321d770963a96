"""A pump as others see it: its name, address and state, and the registry's JSON of it."""

import json
import socket
from dataclasses import dataclass
from pathlib import Path

ONLINE, PAUSING, PAUSED, CLOSING, OFFLINE = "online", "pausing", "paused", "closing", "offline"
_NODE_ID_FILE = "node-id"


@dataclass(slots=True)
class Node:
    """This pump, as others see it; `leaves_as` is the state that it will have when it has ended.

    Once it is `drained_ts`, it has nothing above that but heartbeats, and says so.
    """

    node_id: str
    host: str
    state: str = PAUSED
    leaves_as: str = PAUSED
    drained_ts: int = 0

    def record(self, max_commit_ts: int, update_ts: int) -> bytes:
        """The value of its registry entry."""
        entry = {
            "nodeId": self.node_id,
            "host": self.host,
            "state": self.state,
            "isAlive": False,
            "score": 0,
            "label": None,
            "maxCommitTS": self.drained_ts or max_commit_ts,
            "updateTS": update_ts,
        }
        return json.dumps(entry, separators=(",", ":")).encode()


def node_id(data_dir: Path, given: str, address: str) -> str:
    """The name of this node: the given one, else the one it had before, else hostname:port;
    kept in `data_dir`.
    """
    file = data_dir / _NODE_ID_FILE
    name = given or (file.read_text().strip() if file.exists() else "")
    name = name or f"{socket.gethostname()}:{address.rpartition(':')[2]}"
    file.write_text(f"{name}\n")
    return name
