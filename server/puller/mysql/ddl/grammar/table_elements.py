"""The grammar of what CREATE TABLE and ALTER TABLE share beside columns: keys and constraints,
table options, partitions. Pure.
"""

import re
from typing import Final

from server.puller.mysql.ddl.tokens import NotUnderstoodError, Sort, TokenReader
from server.puller.mysql.ddl.tree import (
    ADDS_PERIOD,
    Charset,
    Engine,
    Key,
    KeyPart,
    NoEffect,
    Spec,
    Versioning,
)

_VECTOR_RESERVED: Final = 110700
"""The MariaDB in which VECTOR became a word that is no name."""
_CHANGES_ROWS: Final = frozenset({"CASCADE", "SET"})
_OF_TWO: Final = frozenset({"SET", "NO"})
"""Actions of a foreign key that have two words."""
_PLAIN_OPTIONS: Final = frozenset(
    re.findall(
        r"\w+",
        """
        AUTO_INCREMENT AVG_ROW_LENGTH CHECKSUM TABLE_CHECKSUM COMMENT COMPRESSION CONNECTION DELAY_KEY_WRITE
        ENCRYPTION ENGINE_ATTRIBUTE SECONDARY_ENGINE_ATTRIBUTE SECONDARY_ENGINE INSERT_METHOD KEY_BLOCK_SIZE
        MAX_ROWS MIN_ROWS PACK_KEYS PASSWORD ROW_FORMAT STATS_AUTO_RECALC STATS_PERSISTENT
        STATS_SAMPLE_PAGES TRANSACTIONAL TYPE AUTOEXTEND_SIZE PAGE_CHECKSUM PAGE_COMPRESSED
        PAGE_COMPRESSION_LEVEL ENCRYPTED ENCRYPTION_KEY_ID IETF_QUOTES SEQUENCE NODEGROUP
        """,
    )
)


class KeyReader(TokenReader):
    """Reads keys and constraints."""

    def key(self) -> Key | None:
        """A key or constraint; None: what comes is none."""
        begin, name = self.at, ""
        named = self.skip("CONSTRAINT")
        absent = named and self.if_not_exists()
        if named and not self._key_word():
            name = self.name()
        if self.skip("PRIMARY", "KEY"):
            return self._key("primary", "")
        if self.skip("UNIQUE"):
            self.skip_any("KEY", "INDEX")
            return self._key("unique", name)
        if self.skip("FOREIGN", "KEY"):
            return self._foreign(name)
        if self.sees("CHECK"):
            self.check()
            return Key("check", name, if_not_exists=absent)
        if named:
            raise NotUnderstoodError("an unknown constraint")
        if self.skip_any("FULLTEXT", "SPATIAL") or self._skip_vector():
            self.skip_any("KEY", "INDEX")
            return self._key("plain", "")
        if self.sees("INDEX") or self.sees("KEY"):
            self.at += 1
            return self._key("plain", "")
        self.at = begin
        return None

    def _skip_vector(self) -> bool:
        """VECTOR, where no column may be called so, or where a key follows."""
        reserved = self.dialect.mariadb and self.dialect.version >= _VECTOR_RESERVED
        is_key = reserved or self.sees("VECTOR", "INDEX") or self.sees("VECTOR", "KEY")
        return is_key and self.skip("VECTOR")

    def _key_word(self) -> bool:
        return any(self.sees(word) for word in ("PRIMARY", "UNIQUE", "FOREIGN", "CHECK"))

    def _key(self, kind: str, name: str) -> Key:
        absent = self.if_not_exists()
        if not self.sees("(") and not self.sees("USING") and not self.sees("TYPE"):
            own = self.new_name()
            name = own if kind != "primary" else ""
        self.using()
        parts = self.key_parts()
        self.key_options()
        return Key(kind, name, parts, if_not_exists=absent)

    def using(self) -> None:
        """USING and a kind of index, as often as it comes."""
        while self.skip_any("USING", "TYPE"):
            if not self.skip_any("BTREE", "HASH", "RTREE"):
                raise NotUnderstoodError("an unknown kind of index")

    def key_parts(self) -> tuple[KeyPart, ...]:
        """Read the columns of a key, in parentheses."""
        self.expect("(")
        parts = self.listed(self._key_part)
        self.expect(")")
        return parts

    def _key_part(self) -> KeyPart:
        if self.sees("("):
            self.parentheses()
            self.skip_any("ASC", "DESC")
            return KeyPart("")
        column, prefix = self.column_name(), None
        if self.skip("WITHOUT", "OVERLAPS"):
            return KeyPart(column, is_period=True)
        if self.skip("("):
            prefix = self.number()
            self.expect(")")
        self.skip_any("ASC", "DESC")
        return KeyPart(column, prefix)

    def key_options(self) -> None:
        """Skip the options behind a key's columns; none of them changes data."""
        while True:
            if self.skip_any("USING", "TYPE"):
                self.at -= 1
                self.using()
            elif self.skip("WITH", "PARSER"):
                self.name()
            elif self.skip_any("VISIBLE", "INVISIBLE", "IGNORED") or self.skip("NOT", "IGNORED"):
                pass
            elif self.skip("COMMENT"):
                self.skip("=")
                self.string()
            elif self.skip_any(
                "KEY_BLOCK_SIZE", "ENGINE_ATTRIBUTE", "SECONDARY_ENGINE_ATTRIBUTE", "CLUSTERING"
            ):
                self.skip("=")
                self.next()
            elif self.skip("M", "=") or self.skip("DISTANCE", "="):  # of a VECTOR INDEX
                self.next()
            else:
                return

    def _foreign(self, name: str) -> Key:
        absent = self.if_not_exists()
        if not self.sees("("):
            name = self.new_name()
        parts = self.key_parts()
        return Key("foreign", name, parts, self.references(), if_not_exists=absent)

    def references(self) -> str:
        """REFERENCES … with its actions; those that change rows."""
        self.expect("REFERENCES")
        self.table_name()
        if self.sees("("):
            self.key_parts()
        changes = []
        while True:
            if self.skip("MATCH"):
                self.next()
            elif self.skip("ON"):
                event = self.skip_any("DELETE", "UPDATE")
                action = self.next().text.upper()
                if not event or action not in ("RESTRICT", "CASCADE", "SET", "NO"):
                    raise NotUnderstoodError("an unknown action of a foreign key")
                # SET NULL, SET DEFAULT, NO ACTION
                whole = f"{action} {self.next().text.upper()}" if action in _OF_TWO else action
                if action in _CHANGES_ROWS:
                    changes.append(f"ON {event} {whole}")
            else:
                return " ".join(changes)

    def check(self) -> None:
        """CHECK (…)."""
        self.expect("CHECK")
        self.parentheses()
        if not self.skip("ENFORCED"):
            self.skip("NOT", "ENFORCED")


class TableOptionReader(TokenReader):
    """Reads table options and partitions."""

    def table_options(self, options: list[Spec]) -> bool:
        """Options until none comes; whether START TRANSACTION was among them."""
        logs_rows = False
        while True:
            self.skip(",")
            if self.skip("START", "TRANSACTION"):
                logs_rows = True
                continue
            option = self.table_option()
            if option is None:
                return logs_rows
            options.append(option)

    def table_option(self) -> Spec | None:
        """Read a table option; None: what comes is none."""
        begin = self.at
        self.skip("DEFAULT")
        if self.skip("CHARACTER", "SET") or self.skip("CHARSET") or self.skip("CHAR", "SET"):
            self.skip("=")
            charset = self.charset()
            return Charset(charset, self.collation())
        if self.sees("COLLATE"):
            return Charset("", self.collation())
        if self.at != begin:
            raise NotUnderstoodError("an unknown default")
        if self.skip("ENGINE") or self.skip("STORAGE", "ENGINE"):
            self.skip("=")
            return Engine(self.charset())
        if self.skip("WITH", "SYSTEM", "VERSIONING"):
            return Versioning(adds=True)
        if self.skip("UNION"):
            self.skip("=")
            self.parentheses()
            return NoEffect("UNION")
        if self.skip_any("DATA", "INDEX") and (self.skip("DIRECTORY") or self._none(begin)):
            self.skip("=")
            self.string()
            return NoEffect("DIRECTORY")
        if self.skip("TABLESPACE"):
            self.skip("=")
            self.name()
            if self.skip("STORAGE"):
                self.next()
            return NoEffect("TABLESPACE")
        self.at = begin
        return self._other_option()

    def period(self) -> Spec:
        """Read the text behind PERIOD FOR: its name and its two columns."""
        system = self.name().upper() == "SYSTEM_TIME"
        self.parentheses()
        return Versioning(adds=True) if system else ADDS_PERIOD

    def _none(self, begin: int) -> bool:
        self.at = begin
        return False

    def collation(self) -> str:
        """COLLATE and a collation's name; nothing, if none comes."""
        self.skip("DEFAULT")
        if not self.skip("COLLATE"):
            return ""
        self.skip("=")
        return self.charset()

    def _other_option(self) -> Spec | None:
        """An option that changes no data: one that is known, or an engine's own `name = value`."""
        token = self.peek()
        if token is None or token.sort not in (Sort.WORD, Sort.NAME):
            return None
        plain = token.is_word(*_PLAIN_OPTIONS)
        following = self.peek(1)
        assigned = following is not None and following.sort is Sort.SYMBOL and following.text == "="
        if not plain and not assigned:
            return None
        self.at += 1 + assigned
        self._option_value()
        return NoEffect(token.text.upper())

    def _option_value(self) -> None:
        token = self.next()
        if token.sort is Sort.SYMBOL:
            if token.text != "-":
                raise NotUnderstoodError("an option without a value")
            self.next()

    # Partitions

    def partitions(self, options: list[Spec]) -> None:
        """PARTITION BY …: where rows are kept, not which there are."""
        if not self.skip("PARTITION", "BY"):
            return
        options.append(NoEffect("PARTITION BY"))
        self._partition_kind(options)
        if self.skip("PARTITIONS"):
            self.number()
        if self.skip("SUBPARTITION", "BY"):
            self._partition_kind(options)
            if self.skip("SUBPARTITIONS"):
                self.number()
        if self.sees("(") and not self.query_follows(0):
            self.parentheses()

    def _partition_kind(self, options: list[Spec]) -> None:
        self.skip("LINEAR")
        kind = self.skip_any("HASH", "KEY", "RANGE", "LIST", "SYSTEM_TIME")
        if kind == "SYSTEM_TIME":
            options.append(Versioning(adds=True))
            while not (self.ended or self.sees("(") or self.sees("PARTITIONS")):
                self.next()
            return
        if not kind:
            raise NotUnderstoodError("an unknown kind of partitions")
        if kind == "KEY" and self.skip("ALGORITHM"):
            self.expect("=")
            self.number()
        self.skip("COLUMNS")
        self.parentheses()

    def query_follows(self, ahead: int) -> bool:
        """Whether a query begins `ahead` tokens from here, perhaps in parentheses."""
        while (
            (token := self.peek(ahead)) is not None
            and token.sort is Sort.SYMBOL
            and token.text == "("
        ):
            ahead += 1
        token = self.peek(ahead)
        return token is not None and token.is_word("SELECT", "WITH", "VALUES", "TABLE")
