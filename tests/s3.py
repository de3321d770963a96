"""An S3 server on a socket (moto) that can be made unavailable, and that checks access keys."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

REGION = "eu-central-1"
_numbers = itertools.count(1)
_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        """Log nothing: it would be in the tests' output."""


class S3:
    """The server, with one empty bucket; `keys` are the access keys that it accepts.

    The key `server` is always accepted: it is that of a catalog, which goes on working.
    """

    def __init__(self) -> None:
        # moto keeps buckets as long as the process lives
        self.bucket = f"lake{next(_numbers)}"
        self.keys = {"right"}
        self.refusal = "InvalidAccessKeyId"
        """The error code for all other keys."""
        self.down = False
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet
        )
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def settings(self, key: str = "right") -> dict[str, str]:
        """Iceberg's properties of this S3."""
        return {
            "s3.endpoint": self.endpoint,
            "s3.path-style-access": "true",
            "s3.access-key-id": key,
            "s3.secret-access-key": "s3cret",
            "client.region": REGION,
            "s3.retry.num-retries": "1",
            "s3.retry.min-wait-ms": "10",
            "s3.retry.max-wait-ms": "100",
        }

    @contextmanager
    def running(self) -> Iterator["S3"]:
        """Serve for the block, with an empty bucket."""
        thread = Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            self._client().create_bucket(
                Bucket=self.bucket, CreateBucketConfiguration={"LocationConstraint": REGION}
            )
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def names(self) -> list[str]:
        """The names of all objects."""
        pages = self._client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        return [found["Key"] for page in pages for found in page.get("Contents", [])]

    def _client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id="server",
            aws_secret_access_key="s3cret",
        )

    def _answer(self, environ: Any, start: Any) -> Any:
        said = environ.get("HTTP_AUTHORIZATION", "")
        if "Credential=server/" not in said:
            if self.down:
                return _refused(start, "503 Service Unavailable", "ServiceUnavailable")
            if not any(f"Credential={key}/" in said for key in self.keys):
                return _refused(start, "403 Forbidden", self.refusal)
        return self._app(environ, start)


def _refused(start: Any, status: str, code: str) -> list[bytes]:
    body = _ERROR.format(code=code).encode()
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]
