"""The options of a sink URI `kafka://host:port,host:port/topic?protocol=…`: TiCDC's names where the
meaning is TiCDC's. Pure.

Passwords come by reference, as for every sink: `password-file=/path`, or `password-env=NAME`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

CANAL_JSON, DEBEZIUM_JSON = "canal-json", "debezium-json"
PROTOCOLS: Final = (CANAL_JSON, DEBEZIUM_JSON, "debezium")
"""`debezium` is TiCDC's name for `debezium-json`."""
PORT: Final = 9092
PARTITIONS: Final = 3
"""Of a topic that the job creates, as TiCDC has it."""
MAX_MESSAGE_BYTES: Final = 10 << 20
TRANSACTION_TIMEOUT_MS: Final = 600_000
"""After this time the brokers end the transaction of a cut, also that of a job that is gone, unless
another job of the topic ends it before.
"""
_MECHANISMS: Final = ("plain", "scram-sha-256", "scram-sha-512")
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_ADDRESS: Final = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::(?P<port>[0-9]{1,5}))?"
)
_PORT_MAX: Final = 65535
Rule = Callable[[str], str]


def _one_of(choices: Sequence[str]) -> Rule:
    def fault(value: str) -> str:
        return "" if value in choices else f"one of {', '.join(choices)}"

    return fault


def _number(value: str) -> str:
    fits = re.fullmatch(r"[1-9][0-9]{0,8}", value)
    return "" if fits else "a whole number, 1 or more"


def _path(value: str) -> str:
    return "" if value.startswith("/") else "the whole path of a PEM file"


def _text(value: str) -> str:
    return "" if value else "a text"


def _mechanism(value: str) -> str:
    return _one_of(_MECHANISMS)(value.lower())


_boolean = _one_of(("true", "false"))
OPTIONS: Final[Mapping[str, Rule]] = {
    "protocol": _one_of(PROTOCOLS),
    "partition-num": _number,
    "replication-factor": _number,
    "auto-create-topic": _boolean,
    "max-message-bytes": _number,
    "transaction-timeout-ms": _number,
    "compression": _one_of(("none", "gzip", "snappy", "lz4", "zstd")),
    "enable-tidb-extension": _boolean,
    "debezium-disable-schema": _boolean,
    "kafka-client-id": _text,
    "enable-tls": _boolean,
    "ca": _path,
    "cert": _path,
    "key": _path,
    "sasl-mechanism": _mechanism,
    "sasl-user": _text,
    "password-file": _path,
    "password-env": _text,
}
"""Each option with its rule, which says what a value must be, or nothing if it is that."""
SHARED: Final = ("mode", "schema-evolution", "trigger", "max-rows-per-trigger")
"""The settings of every lake that mean something to a topic."""
_NOT_OURS: Final = {
    "kafka-version": "the brokers say their version themselves",
    "required-acks": "transactions need the acknowledgement of all in-sync replicas",
    "max-batch-size": "each message is one change",
    "insecure-skip-verify": "name the CA with ca=/path",
    "schema-registry": "there is no protocol avro yet",
}
"""Options of TiCDC that must be left out, and why."""


@dataclasses.dataclass(frozen=True)
class KafkaSettings:
    """The options of a valid URI, with their defaults."""

    protocol: str
    partitions: int | None
    """None: as many as the topic has, or `PARTITIONS` for one that is created."""
    replicas: int | None
    """Of a topic that is created; None: the brokers' default."""
    creates_topic: bool
    max_message_bytes: int
    transaction_timeout_ms: int
    compression: str
    is_extended: bool
    has_schema: bool
    client_id: str

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> "KafkaSettings":
        """Read the options of a `SinkUri`, which has checked them."""
        protocol = options["protocol"]
        return cls(
            protocol=CANAL_JSON if protocol == CANAL_JSON else DEBEZIUM_JSON,
            partitions=int(options["partition-num"]) if "partition-num" in options else None,
            replicas=int(options["replication-factor"])
            if "replication-factor" in options
            else None,
            creates_topic=options.get("auto-create-topic") != "false",
            max_message_bytes=int(options.get("max-message-bytes", MAX_MESSAGE_BYTES)),
            transaction_timeout_ms=int(
                options.get("transaction-timeout-ms", TRANSACTION_TIMEOUT_MS)
            ),
            compression=options.get("compression", "none"),
            is_extended=options.get("enable-tidb-extension") == "true",
            has_schema=options.get("debezium-disable-schema") != "true",
            client_id=options.get("kafka-client-id", ""),
        )


def topic_fault(name: str) -> str:
    """Why Kafka cannot have a topic of that name; nothing if it can."""
    if _TOPIC.fullmatch(name) and name not in (".", ".."):
        return ""
    return (
        f"{name[:80]!r} cannot be a topic: letters, digits, dots, _ and -, at most 249, as in "
        "kafka://host:9092/topic?protocol=canal-json"
    )


def addresses(text: str) -> str:
    """`host:port,host:port` of a URI, each with its port; empty if one of them is none."""
    matches = [_ADDRESS.fullmatch(part) for part in text.split(",")]
    whole = [f"{each['host']}:{int(each['port'] or PORT)}" for each in matches if each]
    ports = [int(each.rpartition(":")[2]) for each in whole]
    fits = len(whole) == len(matches) and all(0 < port <= _PORT_MAX for port in ports)
    return ",".join(whole) if fits else ""


def login_fault(brokers: str, options: Mapping[str, str]) -> str:
    """Why a password would go to brokers in the clear; nothing if it does not."""
    is_clear = options.get("sasl-mechanism", "").lower() == "plain"
    hosts = [each.rpartition(":")[0] for each in brokers.split(",")]
    if not is_clear or options.get("enable-tls") == "true" or all(map(_is_loopback, hosts)):
        return ""
    return (
        "sasl-mechanism=plain sends the password as it is, to whoever answers: add "
        "enable-tls=true, or take scram-sha-512"
    )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "[::1]") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def option_faults(options: Mapping[str, str]) -> list[str]:
    """What is wrong with options that are known by name, each and together."""
    said = [
        f"{name} is {rule}, not {value[:80]!r}"
        for name, value in options.items()
        if name in OPTIONS and (rule := OPTIONS[name](value))
    ]
    said += [f"leave out {name}: {why}" for name, why in _NOT_OURS.items() if name in options]
    if "protocol" not in options:
        said.append(f"protocol is missing: {', '.join(PROTOCOLS)}")
    if options.get("schema-evolution") == "ignore":
        said.append("schema-evolution=ignore: messages always have the columns of their row")
    return said + _login_faults(options)


def _login_faults(options: Mapping[str, str]) -> list[str]:
    said = []
    by_reference = "password-file" in options or "password-env" in options
    login = ("sasl-user" in options, "sasl-mechanism" in options, by_reference)
    if any(login) and not all(login):
        said.append("sasl-user, sasl-mechanism and password-file (or password-env) belong together")
    if ("cert" in options) != ("key" in options):
        said.append("cert and key belong together")
    files = [name for name in ("ca", "cert", "key") if name in options]
    if files and options.get("enable-tls") != "true":
        said.append(f"{', '.join(files)}: they need enable-tls=true")
    return said
