"""The grammar of keys and constraints, in a list of columns or of changes. Pure."""

from typing import Final

from server.puller.mysql.ddl.tokens import NotUnderstoodError, TokenReader
from server.puller.mysql.ddl.tree import Key, KeyPart

_CHANGES_ROWS: Final = frozenset({"CASCADE", "SET"})


class KeyReader(TokenReader):
    """Reads keys and constraints."""

    def key(self) -> Key | None:
        """A key or constraint; None: what comes is none."""
        begin, name = self.at, ""
        named = self.skip("CONSTRAINT")
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
            return Key("check", name)
        if named:
            raise NotUnderstoodError("an unknown constraint")
        if self.skip_any("FULLTEXT", "SPATIAL"):
            self.skip_any("KEY", "INDEX")
            return self._key("plain", "")
        if self.sees("INDEX") or self.sees("KEY"):
            self.at += 1
            return self._key("plain", "")
        self.at = begin
        return None

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
        """The columns of a key."""
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
        """What follows a key's columns; nothing of it changes data."""
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
                if action in ("SET", "NO"):
                    self.next()
                if action in _CHANGES_ROWS:
                    changes.append(f"ON {event} {action}")
            else:
                return " ".join(changes)

    def check(self) -> None:
        """CHECK (…)."""
        self.expect("CHECK")
        self.parentheses()
        if not self.skip("ENFORCED"):
            self.skip("NOT", "ENFORCED")
