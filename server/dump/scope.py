"""What of a changefeed's tables a dump may be asked for: a name that nothing has is refused,
or reported.

A misspelled table would never be read, and a condition under a misspelled name would leave all rows
in. Patterns with wildcards may match what comes later.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final, Self

from server.changefeed import keys
from server.changefeed.filter import TableFilter
from server.changefeed.history import History
from server.changefeed.info import ChangefeedInfo, State
from server.changefeed.records import loaded_changes
from server.dump.errors import DumpInvalidError
from server.dump.job import Job
from sink.flight.feeds import ChangefeedNotExistsError
from storage.meta.meta import Meta
from storage.model.ts import MAX_TS

_NAMED: Final = 20
_WILDCARD: Final = re.compile(r"[*?[]")
IGNORED: Final = "ignored"


@dataclass(frozen=True, slots=True)
class DumpScope:
    """The tables of one changefeed, as the metadata has them."""

    changefeed: str
    scheme: str
    """Of its source; empty: the cluster."""
    names: frozenset[str]
    """Its tables, as far as its log was read."""
    ignored: tuple[str, ...] = ()
    """Tables that its filter takes, and that it leaves out."""
    awaited: tuple[str, ...] = ()
    """The filter of one that does not run: it may have stopped at the statement that brings a
    table.
    """
    stands: str = ""
    """Why it does not run."""

    @classmethod
    async def of(cls, meta: Meta, changefeed: str) -> Self:
        """Read it.

        Raises:
            ChangefeedNotExistsError: there is none.
        """
        pair = await meta.get(keys.info(changefeed))
        if pair is None:
            raise ChangefeedNotExistsError(f"there is no changefeed {changefeed}")
        info = ChangefeedInfo.from_json(pair.value)
        names = History(await loaded_changes(meta, changefeed)).at(MAX_TS)
        scope = cls(changefeed, info.source_uri.partition(":")[0], frozenset(names), info.ignored)
        return (
            scope
            if info.state.is_running
            else replace(scope, awaited=info.rules, stands=_stands(info))
        )

    def check(self, job: Job) -> None:
        """Refuse names that no table has.

        Raises:
            DumpInvalidError: with the names there are.
        """
        for option, given in (
            ("--table", job.tables),
            ("--where", job.where),
            ("--priority", job.priority),
        ):
            for name in _exact(given):
                if name in self.ignored:
                    raise DumpInvalidError(f"{option} {name}: {_left_out(name)}")
                if name not in self.names and not self._may_come(name):
                    names = ", ".join(sorted(self.names)[:_NAMED]) or "none"
                    raise DumpInvalidError(
                        f"{option} {name}: changefeed {self.changefeed} has no such table; its "
                        f"tables are {names}"
                    )
        for name in job.where:
            if _WILDCARD.search(name) or not job.takes(name):
                raise DumpInvalidError(
                    f"--where {name}: it is to be one table that is dumped, by its name"
                )

    def _may_come(self, name: str) -> bool:
        schema_name, _, table_name = name.partition(".")
        return TableFilter(self.awaited).takes(schema_name, table_name)

    def others(self, job: Job, listed: Collection[str]) -> dict[str, tuple[str, str]]:
        """Tables that the job takes and nothing is read of, beside those that are `told`:
        a state, and why.
        """
        missing = {
            name: ("waiting", "no table of the changefeed has this name now")
            for name in _exact(job.tables)
            if name not in self.names
        }
        left_out = {name: (IGNORED, _left_out(name)) for name in self.ignored if job.takes(name)}
        return {name: each for name, each in (missing | left_out).items() if name not in listed}


def _exact(patterns: Iterable[str]) -> Iterable[str]:
    return (pattern for pattern in patterns if not _WILDCARD.search(pattern))


def _stands(info: ChangefeedInfo) -> str:
    """Why it does not run, and what helps: a resume alone does not where the error would come
    again.
    """
    if info.state is State.STOPPED:
        return (
            f"the changefeed is stopped; `tidemark cli changefeed resume -c {info.id}` lets it go "
            "on"
        )
    why = f": [{info.error.code}] {info.error.message}" if info.error else ""
    if info.state is not State.FAILED:
        return f"the changefeed is {info.state.value}{why}"
    return (
        f"the changefeed is failed{why}. Do what this error says; where its cause is gone, "
        f"`tidemark cli changefeed resume -c {info.id}` lets it go on"
    )


def _left_out(name: str) -> str:
    return (
        f"the changefeed leaves {name} out, as it could not be replicated when it was created "
        "(--ignore-ineligible-"
        "table): see `tidemark cli source check` for why; once mended, replicate it by another "
        "changefeed"
    )
