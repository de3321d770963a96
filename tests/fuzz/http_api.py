"""Random requests to the HTTP API of a capture, made from its OpenAPI document:
`python -m tests.fuzz.http_api [--requests N] [--seed S]`.

Paths, parameters and bodies are mostly as the document has them, some are garbage. Whatever comes,
the answer is JSON, its status one that the document or HTTP has for it, never 500, and what is
answered with 200 has the members that the document promises.
"""

import argparse
import http.client
import json
import random
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import grpc
from tidemarkpb.v1 import changefeed_pb2 as pb

from tests.integration.capture.many_tables import TABLES
from tests.integration.capture.processes import Cluster, running_cluster

REFUSED = {400, 404, 405, 409, 503}
_LEFT_OUT = {"resign_owner"}
"""Whoever asks for it gets 503 for everything until another owner is there."""
_CREATED_EVERY = 25
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
_TEXTS = (
    "many", "default", "", "a/b", "%2e%2e", "é\u0000\ud800", "x" * 300, "many.t0", "300",
    "blackhole://", "delta:///lake", "kafka://h:1/t", "mysql://root@127.0.0.1:1/", "1' OR 1=1",
)  # fmt: skip


class WrongAnswerError(Exception):
    """The API answered otherwise than its document says."""


class Api:
    """One capture, and what it says of itself."""

    def __init__(self, address: str, seed: int) -> None:
        self._address = address
        self._random = random.Random(seed)
        self.document: dict[str, Any] = {"components": {"schemas": {}}}
        _, body = self._send("GET", "/api/v2/openapi.json", None)
        self.document = json.loads(body)
        self._operations = [
            (path, method.upper(), operation)
            for path, methods in self.document["paths"].items()
            for method, operation in methods.items()
            if operation["operationId"] not in _LEFT_OUT
        ]

    def ask(self) -> tuple[str, int]:
        """One request; the operation, and the answer's status.

        Raises:
            WrongAnswerError: it is not what the document has.
        """
        path, method, operation = self._random.choice(self._operations)
        if self._rarely():
            method = self._random.choice(_METHODS)
        query: dict[str, str] = {}
        for parameter in operation["parameters"]:
            text = self._text(parameter["schema"])
            if parameter["name"] == "changefeed_id" and self._random.random() < 0.5:
                text = "many"
            if parameter["in"] == "path":
                given = quote(text, safe="", errors="replace") or "many"
                path = path.replace("{" + parameter["name"] + "}", given)
            elif self._random.random() < 0.5:
                query[parameter["name"]] = text.encode(errors="replace").decode()
        schema = operation.get("requestBody")
        body = self._body(schema["content"]["application/json"]["schema"] if schema else {})
        target = f"/api/v2{path.removeprefix('/api/v2')}" + (
            f"?{urlencode(query)}" if query else ""
        )
        status, answer = self._send(method, target, body)
        shown = f"{method} {target} {body!r} -> {status} {answer[:500]!r}"
        self._check(method, operation, status, answer, shown)
        return operation["operationId"], status

    def _check(
        self, method: str, operation: dict[str, Any], status: int, answer: bytes, shown: str
    ) -> None:
        if status != 200 and status not in REFUSED:
            raise WrongAnswerError(shown)
        if method == "HEAD":
            return
        try:
            document = json.loads(answer)
        except ValueError as err:
            raise WrongAnswerError(shown) from err
        name = "Error" if status != 200 else ""
        # Another method of the same path has an answer of its own.
        if status == 200 and method.lower() in self._methods_of(operation):
            content = operation["responses"]["200"]["content"]["application/json"]
            name = content["schema"]["$ref"].rpartition("/")[2]
        if name and (fault := self._fault(self._schemas[name], document, name)):
            raise WrongAnswerError(f"{fault}: {shown}")

    def _methods_of(self, operation: dict[str, Any]) -> list[str]:
        return [
            method
            for methods in self.document["paths"].values()
            for method, each in methods.items()
            if each is operation
        ]

    def _fault(self, schema: dict[str, Any], value: Any, at: str) -> str:
        """What is wrong with a value; empty: nothing."""
        if value is None and schema.get("nullable"):
            return ""
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        kinds = {
            "object": dict, "array": list, "string": str, "boolean": bool, "integer": int,
            "number": (int, float),
        }  # fmt: skip
        if not isinstance(value, kinds[schema["type"]]):
            return f"{at} is no {schema['type']}"
        if "enum" in schema and value not in schema["enum"]:
            return f"{at} is none of {schema['enum']}"
        if isinstance(value, dict):
            missing = [name for name in schema.get("required", ()) if name not in value]
            parts = [
                self._fault(part, value[name], f"{at}.{name}")
                for name, part in schema.get("properties", {}).items()
                if name in value
            ]
            return next(filter(None, [f"{at} lacks {missing}" if missing else "", *parts]), "")
        if isinstance(value, list) and "items" in schema:
            return next(
                filter(None, (self._fault(schema["items"], x, f"{at}[]") for x in value)), ""
            )
        return ""

    @property
    def _schemas(self) -> dict[str, Any]:
        schemas: dict[str, Any] = self.document["components"]["schemas"]
        return schemas

    def _body(self, schema: dict[str, Any]) -> bytes | None:
        if not schema:
            return b"\x00{" if self._rarely() else None
        if self._rarely():
            return self._random.randbytes(self._random.randrange(40))
        return json.dumps(self._value(schema)).encode()

    def _value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        if self._rarely() or depth > 5:
            return self._random.choice([None, -1, 1 << 70, 1.5, True, [], {}, "x", {"x": {}}])
        match schema.get("type"):
            case "object":
                required = schema.get("required", ())
                return {
                    name: self._value(part, depth + 1)
                    for name, part in schema.get("properties", {}).items()
                    if name in required or self._random.random() < 0.4
                }
            case "array":
                count = self._random.randrange(3)
                return [self._value(schema.get("items", {}), depth + 1) for _ in range(count)]
            case "integer":
                return self._random.choice([0, 1, self._random.randrange(1 << 62), (1 << 64) - 1])
            case "boolean":
                return self._random.random() < 0.5
        return self._text(schema)

    def _text(self, schema: dict[str, Any]) -> str:
        known = schema.get("enum", _TEXTS)
        return self._random.choice(_TEXTS if self._rarely() else known)

    def _rarely(self) -> bool:
        return self._random.random() < 0.1

    def _send(self, method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
        host, _, port = self._address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        try:
            connection.request(method, target, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def life(cluster: Cluster, seed: int, requests: int) -> Counter[tuple[str, int]]:
    """Random requests to a capture with one changefeed; how often each operation was answered how.

    Raises:
        WrongAnswerError: see `Api.ask`.
    """
    tables = [pb.Table(schema_name="many", table_info_json=table.to_json()) for table in TABLES]
    create = pb.CreateChangefeedRequest(id="many", sink_uri="blackhole://", tables=tables)
    api = Api(cluster.capture.endpoints["capture"], seed)
    answers: Counter[tuple[str, int]] = Counter()
    for number in range(requests):
        # It is removed again and again.
        if number % _CREATED_EVERY == 0:
            with suppress(grpc.RpcError):
                cluster.api("CreateChangefeed", create)
        answers[api.ask()] += 1
    return answers


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory)) as cluster:
        for (operation, status), count in sorted(
            life(cluster, arguments.seed, arguments.requests).items()
        ):
            print(f"{operation:24} {status} {count}")


if __name__ == "__main__":
    main()
