"""Rules as they stand in the metadata, whoever wrote them."""

import json
from typing import Any

import pytest

from server.coordinator.cluster.rules import RuleStore
from server.coordinator.keys import ClusterKeys
from server.coordinator.leadership.durable_limit import StateLostError
from storage.meta.meta import KeyValue

KEYS = ClusterKeys(7)


def stored(rules: dict[str, bytes]) -> RuleStore:
    class Metadata:
        async def get_prefix(self, prefix: bytes) -> list[KeyValue]:
            pairs = {KEYS.path(tail): value for tail, value in rules.items()}
            return [
                KeyValue(key, value, 1, 1, 1)
                for key, value in pairs.items()
                if key.startswith(prefix)
            ]

    metadata: Any = Metadata()
    return RuleStore(metadata, KEYS)


async def test_a_rule_without_a_group_or_index_has_go_s_zero_values() -> None:
    store = stored(
        {
            "rules/a": b'{"id":"b"}',
            "rules/b": b'{"id":"a","index":1}',
            "rules/c": b'{"id":"c","group_id":"a"}',
        }
    )
    await store.load()
    assert [(rule["group_id"], rule["id"]) for rule in store.ordered()] == [
        ("", "b"),
        ("", "a"),
        ("a", "c"),
        ("pd", "default"),
    ]
    assert [rule["id"] for rule in store.of_group("")] == ["b", "a"]


@pytest.mark.parametrize("prefix", ["rules/", "rule_group/", "region_label/"])
@pytest.mark.parametrize(
    "rule", [{"id": 1}, {"id": "a", "group_id": 1}, {"id": "a", "index": "1"}, [], None]
)
async def test_a_rule_that_cannot_be_ordered_is_told_when_it_is_read(
    prefix: str, rule: object
) -> None:
    with pytest.raises(StateLostError, match="cannot be read; correct it, or delete it"):
        await stored({f"{prefix}a": json.dumps(rule).encode()}).load()
