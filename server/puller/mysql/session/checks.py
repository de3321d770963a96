"""Whether a server's settings and tables let its log tell the truth, each fault with its way out.

Pure.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.names import check_distinct

from server.changefeed.source import FAILURE, OK, WARNING, Check
from server.changefeed.table import TableIneligibleError, TableRecord
from server.puller.mysql.ddl.definition import Definition
from server.puller.mysql.ddl.tree import TableName
from server.puller.mysql.session.connection import Flavor
from server.puller.mysql.tables import record_of

_DAY_S: Final = 86_400
_SKEW_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a server that the checks need."""

    flavor: Flavor
    variables: Mapping[str, str]
    log_status: Mapping[str, Any] = field(default_factory=dict)
    replica_status: Sequence[Mapping[str, Any]] = ()
    definitions: Sequence[Definition] = ()
    cascades: Sequence[tuple[TableName, str, str]] = ()
    """Tables whose rows a foreign key changes: the table, the constraint's name, its rule."""
    grants: Sequence[str] = ()
    clock_skew_s: float = 0.0
    several_hosts: bool = False


def check_settings(facts: Facts) -> Iterator[Check]:
    """The server: version, log, replication, clock."""
    yield _version(facts.flavor)
    for name, expected, state, why, fix in _WANTED:
        if name in facts.variables:
            value = facts.variables[name]
            good = value.upper() == expected
            yield Check(
                name, OK if good else state, value or "''", "" if good else why, "" if good else fix
            )
    if not facts.flavor.is_mariadb:
        yield from _mysql_only(facts)
    yield from _filters(facts)
    yield from _replica(facts)
    yield _retention(facts.variables)
    yield from _misc(facts)


def check_tables(
    facts: Facts, read: Callable[[TableRecord], object], target: str = ""
) -> Iterator[Check]:
    """The tables that are to be replicated to a target of this format;
    `read` raises TableIneligibleError.
    """
    faults = 0
    for place, definition in enumerate(facts.definitions):
        try:
            read(record_of(definition, place + 1))
        except TableIneligibleError as err:
            faults += 1
            name = ".".join(definition.name)
            yield Check(
                f"table {name}",
                FAILURE,
                "cannot be replicated",
                err.message,
                _table_fix(definition),
            )
    try:
        check_distinct(target, (definition.name for definition in facts.definitions))
    except SourceError as err:
        faults += 1
        yield Check("table names", FAILURE, "cannot be told apart", err.message, "see why")
    yield from _generated(facts)
    if not faults:
        yield Check("tables", OK, f"{len(facts.definitions)} can be replicated")
    for table, constraint, rule in facts.cascades:
        yield Check(
            f"foreign key {'.'.join(table)}.{constraint}",
            FAILURE,
            rule,
            "rows that a foreign key changes are not in the log: the target would keep them as "
            "they were",
            f"ALTER TABLE `{table[0]}`.`{table[1]}` DROP FOREIGN KEY `{constraint}`, and add it "
            "again with RESTRICT; or leave the table out",
        )
    if not facts.cascades:
        yield Check("foreign keys", OK, "none changes rows of other tables")


def _generated(facts: Facts) -> Iterator[Check]:
    """Columns whose values the log of a newer MariaDB lacks; seen on 11.8, not on 10.11."""
    if not facts.flavor.is_mariadb or facts.flavor.number < _WITHOUT_GENERATED:
        return
    for definition in facts.definitions:
        names = [column.name for column in definition.columns if column.generated]
        if names:
            yield Check(
                f"table {'.'.join(definition.name)}",
                WARNING,
                f"generated: {', '.join(names)}",
                "this server leaves generated columns out of UPDATE and DELETE: the changefeed "
                "stops at the first one (ErrRowImageNotFull), unless it does not take them",
                "leave these columns out by --columns, or the table, or drop them",
            )


_WITHOUT_GENERATED: Final = (11, 8)
_ROWS_WHY = "without it rows, or some of their columns, are not in the log"
_WANTED: Final = (
    (
        "log_bin",
        "ON",
        FAILURE,
        "there is no log to read",
        "[mysqld] log_bin=binlog, then restart the server",
    ),
    ("sql_log_bin", "ON", FAILURE, "sessions write no log", "SET GLOBAL sql_log_bin=ON"),
    (
        "binlog_format",
        "ROW",
        FAILURE,
        _ROWS_WHY,
        "SET GLOBAL binlog_format='ROW'; sessions must connect anew",
    ),
    (
        "binlog_row_image",
        "FULL",
        FAILURE,
        _ROWS_WHY,
        "SET GLOBAL binlog_row_image='FULL'; sessions must connect anew",
    ),
    (
        "binlog_row_metadata",
        "FULL",
        FAILURE,
        (
            "without it the log does not tell names, signs and keys of columns: schemas would not be "
            "known by place"
        ),
        "SET GLOBAL binlog_row_metadata='FULL'",
    ),
    (
        "binlog_row_value_options",
        "",
        FAILURE,
        "partial JSON is not read",
        "SET GLOBAL binlog_row_value_options=''",
    ),
    (
        "gtid_strict_mode",
        "ON",
        WARNING,
        (
            "without it replicas may order transactions differently, so that a failover would not be "
            "exact"
        ),
        "SET GLOBAL gtid_strict_mode=ON",
    ),
    (
        "binlog_checksum",
        "CRC32",
        WARNING,
        "damage to the log on its way would go unnoticed without TLS",
        "SET GLOBAL binlog_checksum='CRC32'",
    ),
    (
        "sync_binlog",
        "1",
        WARNING,
        (
            "after a crash of its machine the server may give GTIDs that were read to other "
            "transactions"
        ),
        "SET GLOBAL sync_binlog=1",
    ),
    (
        "binlog_order_commits",
        "ON",
        FAILURE,
        "rows may become visible in another order than that of the log",
        "SET GLOBAL binlog_order_commits=ON",
    ),
)


def _version(flavor: Flavor) -> Check:
    least = (10, 5) if flavor.is_mariadb else (8, 0)
    good = flavor.number >= least
    why = "" if good else "its log lacks the columns' names and signs (binlog_row_metadata)"
    fix = (
        ""
        if good
        else f"upgrade to {'MariaDB' if flavor.is_mariadb else 'MySQL'} {least[0]}.{least[1]} or later"
    )
    return Check("version", OK if good else FAILURE, flavor.version, why, fix)


def _mysql_only(facts: Facts) -> Iterator[Check]:
    gtid_mode = facts.variables.get("gtid_mode", "OFF")
    if gtid_mode.upper() != "ON":
        why = (
            "without GTIDs only this very server can be read, and not after its log files are "
            "numbered anew"
        )
        yield Check(
            "gtid_mode",
            FAILURE if facts.several_hosts else WARNING,
            gtid_mode,
            why,
            "SET GLOBAL gtid_mode=ON",
        )
    else:
        yield Check("gtid_mode", OK, gtid_mode)


def _filters(facts: Facts) -> Iterator[Check]:
    status = {str(name).lower(): str(value or "") for name, value in facts.log_status.items()}
    for name in ("binlog_do_db", "binlog_ignore_db"):
        schemas = status.get(name, "")
        why = "" if not schemas else "changes of some schemas are not written to the log"
        yield Check(
            name,
            FAILURE if schemas else OK,
            schemas or "none",
            why,
            f"remove {name} and restart" if schemas else "",
        )


def _replica(facts: Facts) -> Iterator[Check]:
    if not facts.replica_status:
        return
    updates = facts.variables.get(
        "log_slave_updates", facts.variables.get("log_replica_updates", "OFF")
    )
    good = updates.upper() in ("ON", "1")
    why = "" if good else "this is a replica that does not log what it replicates"
    yield Check(
        "log_slave_updates",
        OK if good else FAILURE,
        updates,
        why,
        "" if good else "[mysqld] log_slave_updates=ON",
    )
    for status in facts.replica_status:
        filters = {name: value for name, value in status.items() if _is_filter(str(name)) and value}
        why = "" if not filters else "this replica leaves out some of what its primary has"
        yield Check(
            "replication filters",
            FAILURE if filters else OK,
            ", ".join(map(str, filters)) or "none",
            why,
        )
    order = facts.variables.get(
        "replica_preserve_commit_order", facts.variables.get("slave_preserve_commit_order")
    )
    if order is not None and order.upper() not in ("ON", "1"):
        why = "rows may be committed here in another order than in the log"
        yield Check(
            "replica_preserve_commit_order",
            FAILURE,
            order,
            why,
            "SET GLOBAL replica_preserve_commit_order=ON",
        )


def _is_filter(name: str) -> bool:
    return name.lower().startswith(("replicate_do", "replicate_ignore", "replicate_wild"))


def kept_s(variables: Mapping[str, str]) -> float:
    """How long a server with these variables keeps its log; for ever is infinite."""
    if variables.get("binlog_expire_logs_auto_purge", "ON").upper() in {"OFF", "0"}:
        return math.inf
    seconds = float(variables.get("binlog_expire_logs_seconds", 0) or 0)
    return seconds or float(variables.get("expire_logs_days", 0) or 0) * _DAY_S or math.inf


def _retention(variables: Mapping[str, str]) -> Check:
    seconds = kept_s(variables)
    shown = "for ever" if math.isinf(seconds) else f"{seconds / _DAY_S:g} days"
    if seconds >= _DAY_S:
        return Check("log retention", OK, shown)
    why = "a changefeed that stands still for so long loses its log, and must be dumped anew"
    return Check(
        "log retention", WARNING, shown, why, "SET GLOBAL binlog_expire_logs_seconds=604800"
    )


def _misc(facts: Facts) -> Iterator[Check]:
    if facts.variables.get("wsrep_on", "OFF").upper() == "ON":
        why = (
            "each node has GTIDs of its own unless wsrep_gtid_mode is ON: name one node only in "
            "the source URI"
        )
        yield Check("galera", WARNING, "wsrep_on", why)
    domains = {
        part.split("-")[0] for part in facts.variables.get("gtid_binlog_pos", "").split(",") if part
    }
    if len(domains) > 1:
        why = (
            "each server may have transactions of different domains in another order: a failover "
            "would not be exact"
        )
        fix = (
            "write under one gtid_domain_id; FLUSH BINARY LOGS DELETE_DOMAIN_ID=(…) forgets old "
            "ones"
        )
        state = FAILURE if facts.several_hosts else WARNING
        yield Check("gtid domains", state, ", ".join(sorted(domains)), why, fix)
    if abs(facts.clock_skew_s) > _SKEW_S:
        why = "commit_ts are taken from the server's clock, lag is counted by ours"
        yield Check(
            "clock", WARNING, f"{facts.clock_skew_s:+.1f} s", why, "synchronise both clocks (NTP)"
        )
    everything = any(
        " ON *.* " in grant and ("SELECT" in grant or "ALL PRIVILEGES" in grant)
        for grant in facts.grants
    )
    why = (
        ""
        if everything
        else "the catalogue hides tables that the user may not read: a filter would not find them"
    )
    fix = "" if everything else "GRANT SELECT ON *.* TO the user"
    yield Check(
        "tables seen",
        OK if everything else WARNING,
        "all" if everything else "those with a grant",
        why,
        fix,
    )


def _table_fix(definition: Definition) -> str:
    name = "`.`".join(definition.name)
    if not definition.key and not definition.faults:
        return f"ALTER TABLE `{name}` ADD PRIMARY KEY (…); or leave the table out"
    return "see why; or leave the table out by --filter '!…'"
