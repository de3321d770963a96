"""Where the Parquet files of an Iceberg table lie, for pyarrow, which writes and reads them: disks,
mounts, HDFS, and S3 with the settings that Iceberg's own file IO has.

Those settings are `s3.…` and `client.…` of the catalog, or what a REST catalog lends for a table:
credentials of an hour, say. They go to tasks with their work, as tasks have no Java to ask. Where
there are none, pyarrow looks where every AWS client does: environment, profile, instance.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow.fs as pafs
from py4j.protocol import Py4JError

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.jvm import java_dict, java_items
from pyspark_tidemark.lake.files import RESTORE, file_system
from pyspark_tidemark.lake.iceberg.java_catalog import object_store

_S3: Final = ("s3", "s3a", "s3n")
_ARGUMENTS: Final = {
    "s3.access-key-id": "access_key",
    "s3.secret-access-key": "secret_key",
    "s3.session-token": "session_token",
    "s3.region": "region",
    "client.region": "region",
    "client.assume-role.arn": "role_arn",
    "client.assume-role.external-id": "external_id",
    "client.assume-role.session-name": "session_name",
}
"""What pyarrow calls Iceberg's settings of S3; of two with one meaning the later one counts."""
_UNSUPPORTED: Final = {
    "s3.remote-signing-enabled": "false",
    "s3.sse.type": "none",
    "s3.acl": "",
    "client.credentials-provider": "",
}
"""What pyarrow cannot do, and the value that does not ask for it."""
_REFUSED: Final = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH")
_EXPIRED: Final = ("ExpiredToken", "EXPIRED_TOKEN")
_NO_BUCKET: Final = ("NO_SUCH_BUCKET", "NoSuchBucket")
_TIMEOUT_S: Final = 60
_RETRIES: Final = 5
"""As Iceberg's own client."""


@dataclass(frozen=True)
class Storage:
    """What opens a table's files; pickled into tasks, and never shown: it may hold credentials."""

    s3: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    """Arguments of pyarrow's S3FileSystem."""

    @property
    def is_lent(self) -> bool:
        """Whether its credentials end some time."""
        return "session_token" in dict(self.s3)

    def open(self, location: str) -> tuple[Any, str]:
        """Pyarrow's file system for a location, and the path in it."""
        if is_s3(location):
            return _s3_file_system(self.s3), location.partition("://")[2]
        return file_system(location)

    @contextmanager
    def errors_named(self, location: str) -> Iterator[None]:
        """Give what S3 answers a code, and that a file is gone.

        Raises:
            SourceError: ErrCredentials; ErrTargetUnusable, there is no such bucket; ErrLakeDamaged;
                ErrTargetUnavailable, a new try may help.
        """
        try:
            yield
        except FileNotFoundError:
            # A rewrite of somebody else's may have removed it since the table was looked at.
            raise SourceError(
                "ErrLakeDamaged",
                f"{location} is not there. Unless the next try finds the table without it, "
                f"somebody has removed a file that the table needs: {RESTORE}",
                retryable=True,
            ) from None
        except OSError as err:
            if not is_s3(location):
                raise
            raise _named(err, location) from None


def is_s3(location: str) -> bool:
    """Whether a location is in S3, or in what speaks S3's protocol."""
    return location.partition("://")[0] in _S3


def storage_of(table: Any, location: str) -> Storage:
    """The storage of a table (of Iceberg's Java) whose files are below a location.

    Raises:
        SourceError: ErrTargetUnusable, pyarrow cannot write there.
    """
    if is_s3(location):
        return Storage(s3_arguments(_properties(table.io(), location)))
    if object_store(location):
        raise SourceError(
            "ErrTargetUnusable",
            f"the catalog puts the table at {location}: files are written to disks, mounts, HDFS "
            "and S3 only; give the catalog, or the namespace, a warehouse there",
        )
    return Storage()


def s3_arguments(properties: Mapping[str, str]) -> tuple[tuple[str, Any], ...]:
    """Pyarrow's arguments for Iceberg's settings of S3. Pure.

    Raises:
        SourceError: ErrTargetUnusable, one of them asks for what pyarrow cannot do.
    """
    for setting, harmless in _UNSUPPORTED.items():
        if properties.get(setting, harmless) != harmless:
            raise SourceError(
                "ErrTargetUnusable",
                f"the catalog's setting {setting} cannot be kept by the tasks, which write files "
                "with pyarrow; unset it (a bucket's own default encryption works)",
            )
    arguments: dict[str, Any] = {
        argument: properties[setting]
        for setting, argument in _ARGUMENTS.items()
        if setting in properties
    }
    if endpoint := properties.get("s3.endpoint", ""):
        scheme, _, host = endpoint.rpartition("://")
        path_style = properties.get("s3.path-style-access", "false") == "true"
        arguments |= {
            "scheme": scheme or "https",
            "endpoint_override": host.rstrip("/"),
            "force_virtual_addressing": not path_style,
        }
    if retries := properties.get("s3.retry.num-retries", ""):
        arguments["retries"] = int(retries)
    if "role_arn" in arguments:
        # Pyarrow takes either keys or a role.
        for key in ("access_key", "secret_key", "session_token"):
            arguments.pop(key, None)
    return tuple(sorted(arguments.items()))


def _properties(io: Any, location: str) -> dict[str, str]:
    """The settings of a table's file IO, and over them the credentials lent for the longest prefix
    of the location.
    """
    properties = java_dict(io.properties())
    try:
        credentials = java_items(io.credentials())
    except Py4JError:
        # Not all kinds of file IO can be lent any.
        return properties
    lent = {
        str(each.prefix()): each for each in credentials if location.startswith(str(each.prefix()))
    }
    return properties | (java_dict(lent[max(lent, key=len)].config()) if lent else {})


@functools.lru_cache(maxsize=16)
def _s3_file_system(arguments: tuple[tuple[str, Any], ...]) -> Any:
    # One for each set of credentials of a process: it has connections.
    given = dict(arguments)
    retries = given.pop("retries", _RETRIES)
    return pafs.S3FileSystem(
        **given,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=retries + 1),
        connect_timeout=_TIMEOUT_S,
        request_timeout=_TIMEOUT_S,
        # A small file is one request, not three.
        allow_delayed_open=True,
    )


def _named(err: OSError, location: str) -> SourceError:
    text = str(err).partition("\n")[0]
    if any(word in text for word in _EXPIRED):
        return SourceError(
            "ErrTargetUnavailable",
            f"the credentials that were lent for {location} have ended: {text}",
            retryable=True,
        )
    if any(word in text for word in _REFUSED):
        return SourceError("ErrCredentials", f"S3 does not allow this at {location}: {text}")
    if any(word in text for word in _NO_BUCKET):
        return SourceError("ErrTargetUnusable", f"there is no such bucket: {location}")
    return SourceError("ErrTargetUnavailable", f"S3 fails at {location}: {text}", retryable=True)
