"""The captures that are registered in a cluster's metadata, as they are named to a user."""

import json
from contextlib import suppress

from server.changefeed import keys
from storage.meta.meta import Meta
from storage.model.errors import InvalidError


class OtherClusterError(InvalidError):
    """The capture and the coordinator belong to different clusters: no capture of the one's is
    registered at the other.
    """

    code = "ErrOtherCluster"

    def __init__(self, capture: str, coordinator: str, option: str) -> None:
        """By the addresses that were named; `option` names coordinators."""
        super().__init__(
            f"the capture at {capture} does not belong to the cluster of the coordinator at "
            f"{coordinator}; name the capture's coordinator with {option}"
        )


async def registered_captures(meta: Meta) -> dict[str, str]:
    """Return the addresses of the registered captures by their ids, the owner's first."""
    owner = await meta.get(keys.OWNER)
    pairs = await meta.get_prefix(keys.CAPTURES)
    records = {}
    for pair in pairs:
        with suppress(ValueError, KeyError, TypeError):
            record = json.loads(pair.value)
            records[str(record["id"])] = str(record["address"])
    owner_id = owner.value.decode(errors="replace") if owner else ""
    return dict(sorted(records.items(), key=lambda record: record[0] != owner_id))
