"""What a lake format is: one record, `LakeFormat`, that each format's package has in its
`__init__` and that `registry` lists. Pure.

Captures, the command line, lake jobs and `verify` look here for what a format can do and what it
needs. Records are cheap to import: they name the module that needs Spark or a driver, and
`implementation` loads it.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

UPSERT, APPEND, SCD2, SOFT_DELETE = "upsert", "append", "scd2", "soft-delete"
MODES: Final = (UPSERT, APPEND, SCD2, SOFT_DELETE)
ROW_MODES: Final = (UPSERT, SOFT_DELETE)
"""Those that keep one row for each key."""
MERGING_MODES: Final = (UPSERT, SOFT_DELETE, APPEND)
"""Those in which tables can be merged of shards."""
EVOLVE, EXCEPTION, IGNORE = "evolve", "exception", "ignore"
EVOLUTIONS: Final = (EVOLVE, EXCEPTION, IGNORE)
"""What a lake job can do at a DDL, its default first."""
ON, OFF = "on", "off"
DELETION_VECTORS: Final = (ON, OFF)
"""Whether rows that are gone are masked by deletion vectors, the default first."""
AUTO, DRIVER, SPARK = "auto", "driver", "spark"
WRITES: Final = (AUTO, DRIVER, SPARK)
"""Who reads the rows of a cut and writes their files, the default first: `lake.changes` has the
bounds of each.
"""
COLUMNS, TRANSFORMS = "columns", "transforms"
"""By what a format's tables can be partitioned: columns as they are, or Iceberg's transforms."""
KEEP, DROP = "keep", "drop"
ON_DROP: Final = (KEEP, DROP)
"""What can become of a table that was dropped upstream, the default first."""


def no_fault(name: str) -> str:  # noqa: ARG001 - a rule's signature
    """The rule that allows every name."""
    return ""


@dataclass(frozen=True)
class NameRules:
    """Which names a format can hold: each rule says why it cannot, or nothing if it can."""

    identifier: Callable[[str], str] = no_fault
    """Of databases, tables and columns."""
    database: Callable[[str], str] = no_fault
    """Of databases, besides."""
    column: Callable[[str], str] = no_fault
    """Of columns, besides."""
    ignores_case: bool = False
    """Whether two tables whose names differ in case only are one."""


def own_column(readers: str) -> NameRules:
    """The rules of a format whose readers show a column of their own, in any case."""

    def fault(name: str) -> str:
        if name.lower() == readers:
            return f"readers of such a lake have a column {name} of their own"
        return ""

    return NameRules(column=fault)


@dataclass(frozen=True)
class Jars:
    """What Spark needs of a format: where Maven has it, and the files that were tested."""

    coordinates: str
    digests: Mapping[str, str]
    """The SHA-256 of each file, by its name."""


@dataclass(frozen=True, kw_only=True)
class LakeFormat:
    """One format that a lake job can write."""

    name: str
    """The scheme of its sink URIs."""
    title: str
    """As its makers write it."""
    modes: tuple[str, ...]
    """Those of `MODES` that it has, its default first."""
    entry_point: str
    """`module:name` of its `target.LakeConnector`, or, of a database, its
    `databases.database.Database`, or, of a topic, its `target.Target`.
    """
    port: int = 0
    """A database's default port; 0: the lake is none."""
    is_topic: bool = False
    """Whether its lakes are topics of a log, from which nobody reads rows back."""
    aliases: tuple[str, ...] = ()
    """Other schemes that users try for it."""
    tasks_write: bool = False
    """Whether tasks of Spark can write the files of its tables."""
    tasks_write_remotely: bool = False
    """The same of its tables where only Hadoop reaches."""
    partitions: str = ""
    """By what its tables can be partitioned, `COLUMNS` or `TRANSFORMS`; empty: they cannot be."""
    merges_shards: bool = False
    """Whether its tables can be merged of shards, in `MERGING_MODES`: its target is a
    `target.ShardTarget`.
    """
    is_sorted: bool = False
    """Whether the files of its tables can be sorted."""
    has_catalogs: bool = False
    """Whether its tables may be in a catalog, named as `FORMAT+catalog://NAME`."""
    needs_rename: bool = False
    """Whether commits are renames that must fail if there is a file of the new name."""
    jars: Jars | None = None
    store_jars: Mapping[str, Jars] = field(default_factory=dict)
    """What it needs besides where its files lie in an object store, by the store's name."""
    session: Mapping[str, str] = field(default_factory=dict)
    """Settings of its Spark session."""
    names: NameRules = field(default_factory=NameRules)

    @property
    def is_database(self) -> bool:
        """Whether its lakes are databases."""
        return self.port > 0

    @property
    def is_directory(self) -> bool:
        """Whether its lakes are directories, or in catalogs."""
        return not self.is_database and not self.is_topic

    def implementation(self) -> Any:
        """Import the class that `entry_point` names.

        Raises:
            ImportError: a package that only this format needs is missing.
        """
        module, _, name = self.entry_point.partition(":")
        return getattr(importlib.import_module(module), name)
