"""An Iceberg REST catalog on a real socket: HTTP by Python,
what requests do by Iceberg's own handlers for servers, in the JVM of the tests' Spark.

It can lose the answers of commits, be down, want a token, and ignore the case of names.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from py4j.protocol import Py4JJavaError

_CODES = {
    "NoSuchNamespaceException": 404,
    "NoSuchTableException": 404,
    "AlreadyExistsException": 409,
    "CommitFailedException": 409,
}


class RestCatalog:
    """The catalog; its tables lie in `warehouse`, as those of a Hadoop catalog do."""

    def __init__(self, spark: Any, warehouse: str) -> None:
        self._jvm = spark._jvm
        self._gateway = spark.sparkContext._gateway
        self._iceberg = self._jvm.org.apache.iceberg
        settings = spark.sparkContext._jsc.hadoopConfiguration()
        self._java = self._iceberg.hadoop.HadoopCatalog(settings, warehouse)
        self._mapper = self._new_mapper()
        self.token = ""
        self.down = False
        self.folds_case = False
        self.lost_answers = 0
        """So many of the next commits are made, and not answered."""
        self.requests: list[str] = []
        catalog = self

        class Handler(_Handler):
            def handle_one_request(self) -> None:
                self.catalog = catalog
                super().handle_one_request()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        # a client that was closed, or killed, is not worth a word
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.uri = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator["RestCatalog"]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def answer(self, method: str, path: str, body: str) -> str:
        """The JSON of an answer; raises Py4JJavaError."""
        _, *parts = path.strip("/").split("/")
        if parts == ["config"]:
            return '{"defaults": {}, "overrides": {}}'
        if parts == ["namespaces"]:
            request = self._read(body, "requests.CreateNamespaceRequest")
            return self._text(self._handlers.createNamespace(self._java, request))
        namespace = self._iceberg.catalog.Namespace.of(self._strings(parts[1].split("\x1f")))
        if len(parts) == 2:
            return self._text(self._handlers.loadNamespace(self._java, namespace))
        if len(parts) == 3:
            if method == "GET":
                return self._text(self._handlers.listTables(self._java, namespace))
            self._handlers.loadNamespace(self._java, namespace)
            request = self._read(body, "requests.CreateTableRequest")
            return self._text(self._handlers.createTable(self._java, namespace, request))
        name = parts[3].lower() if self.folds_case else parts[3]
        table = self._iceberg.catalog.TableIdentifier.of(namespace, name)
        if method == "DELETE":
            self._handlers.purgeTable(self._java, table)
            return ""
        if method == "POST":
            request = self._read(body, "requests.UpdateTableRequest")
            return self._text(self._handlers.updateTable(self._java, table, request))
        everything = getattr(self._iceberg.rest, "RESTCatalogProperties$SnapshotMode").ALL
        return self._text(self._handlers.loadTable(self._java, table, everything))

    @property
    def _handlers(self) -> Any:
        return self._iceberg.rest.CatalogHandlers

    def _new_mapper(self) -> Any:
        """As Iceberg's own, which is not public."""
        jackson = self._iceberg.shaded.com.fasterxml.jackson
        mapper = jackson.databind.ObjectMapper()
        mapper.setVisibility(
            jackson.annotation.PropertyAccessor.FIELD,
            getattr(jackson.annotation, "JsonAutoDetect$Visibility").ANY,
        )
        kebab = getattr(jackson.databind, "PropertyNamingStrategies$KebabCaseStrategy")
        mapper.setPropertyNamingStrategy(kebab())
        self._iceberg.rest.RESTSerializers.registerAll(mapper)
        return mapper

    def _read(self, body: str, name: str) -> Any:
        loader = self._jvm.java.lang.Thread.currentThread().getContextClassLoader()
        kind = self._jvm.java.lang.Class.forName(f"org.apache.iceberg.rest.{name}", True, loader)
        return self._mapper.readValue(body, kind)

    def _text(self, answer: Any) -> str:
        return str(self._mapper.writeValueAsString(answer))

    def _strings(self, parts: list[str]) -> Any:
        array = self._gateway.new_array(self._jvm.java.lang.String, len(parts))
        for at, part in enumerate(parts):
            array[at] = part
        return array


class _Handler(BaseHTTPRequestHandler):
    catalog: RestCatalog
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._do()

    def do_HEAD(self) -> None:
        self._do()

    def do_POST(self) -> None:
        self._do()

    def do_DELETE(self) -> None:
        self._do()

    def _do(self) -> None:
        catalog = self.catalog
        path = "/".join(unquote(part) for part in urlsplit(self.path).path.split("/"))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        catalog.requests.append(f"{self.command} {path}")
        if catalog.down:
            self.close_connection = True
            return
        if catalog.token and self.headers.get("Authorization") != f"Bearer {catalog.token}":
            self._fail(401, "NotAuthorizedException", "no such token")
            return
        try:
            text = catalog.answer(self.command, path, body)
        except Py4JJavaError as err:
            name = str(err.java_exception.getClass().getSimpleName())
            self._fail(_CODES.get(name, 400), name, str(err.java_exception.getMessage()))
            return
        if self.command == "POST" and path.count("/") == 5 and catalog.lost_answers:
            catalog.lost_answers -= 1
            self.close_connection = True
            return
        self._answer(200 if text else 204, text)

    def _fail(self, code: int, name: str, said: str) -> None:
        error = {"message": said, "type": name, "code": code}
        self._answer(code, json.dumps({"error": error}))

    def _answer(self, code: int, text: str) -> None:
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Not to the tests' output."""
