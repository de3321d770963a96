"""The owner of a service id, by its name; and names as they can be shown and pasted into a shell.

Pure.

Source: TiCDC's gc manager for the ids of changefeeds; the ids of BR, Lightning, Dumpling and TiDB
as they set them.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Final

FEED_PREFIX: Final = "ticdc-default-"
CREATING_PREFIX: Final = f"{FEED_PREFIX}creating_"
"""A changefeed's id has no underscore, so that no changefeed's own service begins like this."""
OLD_CREATING_PREFIX: Final = f"{FEED_PREFIX}creating-"
"""The prefix that captures wrote before; a changefeed `creating-x` has a service that begins like
this, too.
"""
FEED_TTL_S: Final = 86_400
CREATING_TTL_S: Final = 3_600
_GENERATION: Final = re.compile(r"\.([0-9]+)\Z")
"""No changefeed's id has a dot."""

_OWNERS: Final = (
    ("ticdc", "a TiCDC cluster"),
    ("tidb-ddl-", "a DDL job of TiDB"),
    ("tidb_backfill", "a DDL job of TiDB"),
    ("native_br", "BR"),
    ("br-", "BR"),
    ("log-backup", "BR's log backup"),
    ("lightning", "TiDB Lightning"),
    ("dumpling", "Dumpling"),
    ("drainer", "a Drainer"),
)


def feed_service(changefeed: str, generation: int = 0) -> str:
    """The service that keeps a changefeed's history; `generation` distinguishes it from removed
    ones of the same id.
    """
    return FEED_PREFIX + changefeed + (f".{generation}" if generation else "")


def generation_of(service_id: str) -> int:
    """Which of the changefeeds of one id a service belongs to that is no creation's."""
    match = _GENERATION.search(service_id)
    return int(match[1]) if match else 0


def creating_service(changefeed: str, began_ts: int = 0) -> str:
    """The service that keeps history while the changefeed is being created or resumed; `began_ts`
    distinguishes attempts.
    """
    return CREATING_PREFIX + changefeed + (f".{began_ts}" if began_ts else "")


def feed_of(service_id: str) -> str:
    """Return the changefeed that a service id belongs to; empty if it is not one of Tidemark's."""
    for prefix in (CREATING_PREFIX, FEED_PREFIX):
        if service_id.startswith(prefix):
            return _GENERATION.sub("", service_id.removeprefix(prefix))
    return ""


def left_over_services(service_ids: Iterable[str], protected: Mapping[str, bool]) -> list[str]:
    """Services of creations and resumes that are over, while none is under way.

    `protected` says of each changefeed whether it needs none: its own service keeps its history, or
    it does not run.
    """
    left_over = []
    for service_id in service_ids:
        if service_id.startswith(CREATING_PREFIX):
            changefeed = feed_of(service_id)
        elif service_id.startswith(OLD_CREATING_PREFIX) and feed_of(service_id) not in protected:
            changefeed = service_id.removeprefix(OLD_CREATING_PREFIX)
        else:
            continue
        if protected.get(changefeed, True):
            left_over.append(service_id)
    return left_over


def owner_of(service_id: str) -> str:
    """Return the program that uses such ids, as far as the name shows."""
    return next((owner for prefix, owner in _OWNERS if service_id.startswith(prefix)), "unknown")


def shown(text: str) -> str:
    """`text` without control characters and without what is no Unicode."""
    valid = text.encode(errors="backslashreplace").decode()
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in valid
    )


def quoted(text: str) -> str:
    """`text` as one word of a shell command."""
    return shlex.quote(shown(text))
