"""An Iceberg REST catalog on a real socket: HTTP by Python,
what requests do by Iceberg's own handlers for servers, in the JVM of the tests' Spark.

It can lose the answers of commits, be down, want a token, and ignore the case of names.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from py4j.protocol import Py4JJavaError

from tests.s3 import S3

_CODES = {
    "NoSuchNamespaceException": 404,
    "NoSuchTableException": 404,
    "AlreadyExistsException": 409,
    "CommitFailedException": 409,
}


class RefusedError(Exception):
    """The catalog does not take a request."""


class RestCatalog:
    """The catalog; its tables lie in `warehouse`, a directory, or in S3."""

    def __init__(self, spark: Any, warehouse: str, s3: S3 | None = None) -> None:
        self._jvm = spark._jvm
        self._gateway = spark.sparkContext._gateway
        self._iceberg = self._jvm.org.apache.iceberg
        self.settings = s3.settings() if s3 else {}
        self._own = s3.settings("server") if s3 else {}
        """What it tells its clients of the place of tables."""
        self.lent: dict[str, str] = {}
        """What it lends them for each table; with it, `settings` have no keys."""
        self._warehouse = warehouse
        if s3:
            self.move(warehouse)
        else:
            hadoop = spark.sparkContext._jsc.hadoopConfiguration()
            self.java = self._iceberg.hadoop.HadoopCatalog(hadoop, warehouse)
        self._mapper = self._new_mapper()
        self.token = ""
        self.down = False
        self.folds_case = False
        self.commits_together = True
        """Whether it commits several tables at once."""
        self.shows_newest_only = False
        """Whether it keeps the older snapshots of a table to itself, as Nessie does."""
        self.misses_namespaces = False
        """Whether it says of a table in a namespace that is not there that the namespace is not."""
        self.is_raced = False
        """Whether somebody else makes each namespace at the same time, which it tells as Nessie."""
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
            told = {} if self.lent else self.settings
            return json.dumps({"defaults": told, "overrides": {}})
        if parts == ["transactions", "commit"]:
            self._commit_together(body)
            return ""
        if parts == ["namespaces"]:
            request = self._read(body, "requests.CreateNamespaceRequest")
            answer = self._text(self._handlers.createNamespace(self.java, request))
            if self.is_raced:
                raise RefusedError("New value to update existing key has no content ID")
            return answer
        namespace = self._iceberg.catalog.Namespace.of(self._strings(parts[1].split("\x1f")))
        if len(parts) == 2:
            return self._text(self._handlers.loadNamespace(self.java, namespace))
        if len(parts) == 3:
            if method == "GET":
                return self._text(self._handlers.listTables(self.java, namespace))
            self._handlers.loadNamespace(self.java, namespace)
            request = self._read(body, "requests.CreateTableRequest")
            created = self._handlers.createTable(self.java, namespace, request)
            return self._with_credentials(self._text(created))
        name = parts[3].lower() if self.folds_case else parts[3]
        table = self._iceberg.catalog.TableIdentifier.of(namespace, name)
        if method == "DELETE":
            self._handlers.purgeTable(self.java, table)
            return ""
        if method == "POST":
            request = self._read(body, "requests.UpdateTableRequest")
            return self._text(self._handlers.updateTable(self.java, table, request))
        if self.misses_namespaces:
            self._handlers.loadNamespace(self.java, namespace)
        everything = getattr(self._iceberg.rest, "RESTCatalogProperties$SnapshotMode").ALL
        loaded = self._text(self._handlers.loadTable(self.java, table, everything))
        return self._with_credentials(self._newest(loaded) if self.shows_newest_only else loaded)

    @staticmethod
    def _newest(text: str) -> str:
        answer = json.loads(text)
        metadata = answer["metadata"]
        metadata["snapshots"] = [
            each
            for each in metadata["snapshots"]
            if each["snapshot-id"] == metadata.get("current-snapshot-id")
        ]
        metadata["snapshot-log"] = []
        return json.dumps(answer)

    def _commit_together(self, body: str) -> None:
        """All tables, or none if somebody has changed one of them."""
        request = self._read(body, "requests.CommitTransactionRequest")
        for change in request.tableChanges():
            metadata = self.java.loadTable(change.identifier()).operations().current()
            for requirement in change.requirements():
                requirement.validate(metadata)
        for change in request.tableChanges():
            self._handlers.updateTable(self.java, change.identifier(), change)

    def cuts(self) -> set[str]:
        """The cuts that the tables show which have any, as an engine sees them now."""
        bank = self._iceberg.catalog.Namespace.of(self._strings(["mysql", "bank"]))
        tables = self.java.listTables(bank) if self.java.namespaceExists(bank) else ()
        shown = []
        for table in tables:
            # One that another request is making has a directory, and no metadata yet.
            with suppress(Py4JJavaError):
                shown.append(self.java.loadTable(table).currentSnapshot())
        return {str(each.summary().get("cdc.cut")) for each in shown if each is not None}

    def register_older(self, name: str) -> None:
        """Put the metadata of before the newest commit in the place of the table's, as a restored
        catalog does.
        """
        table = self._iceberg.catalog.TableIdentifier.parse(name)
        before = list(self.java.loadTable(table).operations().current().previousFiles())[-1]
        self.java.dropTable(table, False)
        self.java.registerTable(table, before.file())

    def rows(self, name: str) -> list[dict[str, Any]]:
        """What the table library's own generic reader gives of a table."""
        table = self.java.loadTable(self._iceberg.catalog.TableIdentifier.parse(name))
        columns = [str(field.name()) for field in table.schema().columns()]
        lists = self._iceberg.relocated.com.google.common.collect.Lists
        found = lists.newArrayList(self._iceberg.data.IcebergGenerics.read(table).build())
        return [{column: row.getField(column) for column in columns} for row in found]

    def _with_credentials(self, text: str) -> str:
        if not self.lent:
            return text
        credentials = {"prefix": self._warehouse, "config": self.lent}
        other = {
            "prefix": "s3://other",
            "config": {"s3.access-key-id": "x", "s3.secret-access-key": "x"},
        }
        settings = {name: value for name, value in self.settings.items() if "key" not in name}
        return json.dumps(
            json.loads(text) | {"config": settings, "storage-credentials": [other, credentials]}
        )

    def move(self, warehouse: str) -> None:
        """Put new tables elsewhere in S3."""
        self._warehouse = warehouse
        self.java = self._iceberg.inmemory.InMemoryCatalog()
        self.java.initialize("server", self._properties())
        self._keep_files_in_s3()

    def _keep_files_in_s3(self) -> None:
        """The catalog in memory keeps its own files there, too."""
        io = self._iceberg.CatalogUtil.loadFileIO(
            "org.apache.iceberg.aws.s3.S3FileIO", self._properties(), None
        )
        field = self.java.getClass().getDeclaredField("io")
        field.setAccessible(True)
        field.set(self.java, io)

    def _properties(self) -> Any:
        properties = self._jvm.java.util.HashMap()
        properties.put("warehouse", self._warehouse)
        for name, value in self._own.items():
            properties.put(name, value)
        return properties

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
        if path.endswith("/transactions/commit") and not catalog.commits_together:
            self._fail(404, "NotFoundException", "no such route")
            return
        try:
            text = catalog.answer(self.command, path, body)
        except RefusedError as err:
            self._fail(400, "BadRequestException", str(err))
            return
        except Py4JJavaError as err:
            name = str(err.java_exception.getClass().getSimpleName())
            self._fail(_CODES.get(name, 400), name, str(err.java_exception.getMessage()))
            return
        is_commit = path.count("/") == 5 or path.endswith("/transactions/commit")
        if self.command == "POST" and is_commit and catalog.lost_answers:
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
