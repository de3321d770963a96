"""The containers of one composition, by Docker's API over its Unix socket; standard library only,
as the image that runs it has no Docker.
"""

import http.client
import json
import socket
import time
import urllib.parse
from dataclasses import dataclass
from typing import Any, Final

_PROJECT: Final = "com.docker.compose.project"
_SERVICE: Final = "com.docker.compose.service"
_ONE_OFF: Final = "com.docker.compose.oneoff"
_TIMEOUT_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.5
_STOP_GRACE_S: Final = 30
"""As compose.yaml has it: then it is killed."""


class ContainersError(Exception):
    """Docker does not answer, or refuses; the message says what to do."""


@dataclass(frozen=True)
class Container:
    """One container, as it was when it was asked for."""

    id: str
    service: str
    state: str
    """`running`, `paused`, `exited`, …"""


class Composition:
    """The containers of one project."""

    def __init__(self, socket_path: str, project: str = "") -> None:
        """Without a `project`, that of the container which this process runs in.

        Raises:
            ContainersError: Docker does not answer; or it is not known which project is meant.
        """
        self._socket_path = socket_path
        self._own_id = ""
        self.project = project or self._own_project()

    def containers(self) -> list[Container]:
        """Those of the project's services that have a health check, but for this process's own: of
        the others nobody could say when they are back.
        """
        label = json.dumps({"label": [f"{_PROJECT}={self.project}", f"{_ONE_OFF}=False"]})
        query = urllib.parse.urlencode({"all": "1", "filters": label})
        return [
            Container(each["Id"], each["Labels"][_SERVICE], each["State"])
            for each in self._ask("GET", f"/containers/json?{query}")
            if each["Id"] != self._own_id and self._has_health_check(each["Id"])
        ]

    def break_(self, container: Container, kind: str) -> None:
        """Kill, stop or pause it."""
        actions = {
            "kill": "kill?signal=KILL",
            "stop": f"stop?t={_STOP_GRACE_S}",
            "pause": "pause",
        }
        self._ask("POST", f"/containers/{container.id}/{actions[kind]}")

    def mend(self, container: Container) -> None:
        """Have it run again, whatever was done to it."""
        state = self._ask("GET", f"/containers/{container.id}/json")["State"]
        if state["Paused"]:
            self._ask("POST", f"/containers/{container.id}/unpause")
        elif not state["Running"]:
            self._ask("POST", f"/containers/{container.id}/start")

    def wait_healthy(self, container: Container, limit_s: float) -> None:
        """Wait until its health check says that it is well.

        Raises:
            ContainersError: it is not within `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        while True:
            state = self._ask("GET", f"/containers/{container.id}/json")["State"]
            if state["Running"] and state["Health"]["Status"] == "healthy":
                return
            if time.monotonic() > deadline:
                raise ContainersError(
                    f"{container.service} is not healthy {limit_s:.0f} s after its fault; see "
                    f"docker logs {container.id[:12]}"
                )
            time.sleep(_LOOK_EVERY_S)

    def _own_project(self) -> str:
        try:
            own = self._ask("GET", f"/containers/{socket.gethostname()}/json")
            self._own_id = own["Id"]
            return str(own["Config"]["Labels"][_PROJECT])
        except (ContainersError, KeyError) as err:
            raise ContainersError(
                f"cannot tell which composition is meant ({err}); run this as the service `chaos` "
                "of deploy/compose.yaml, or name it: --project tidemark"
            ) from err

    def _has_health_check(self, container_id: str) -> bool:
        return "Health" in self._ask("GET", f"/containers/{container_id}/json")["State"]

    def _ask(self, method: str, path: str) -> Any:
        connection = _UnixConnection(self._socket_path)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read()
        except OSError as err:
            raise ContainersError(
                f"Docker does not answer at {self._socket_path}: {err}; DOCKER_SOCKET names "
                "another socket to mount"
            ) from err
        finally:
            connection.close()
        document = json.loads(body) if body else {}
        # 304: it is so already
        if answer.status >= http.client.BAD_REQUEST:
            raise ContainersError(f"{method} {path}: {document.get('message', answer.status)}")
        return document


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
