"""Placement rules and region labels: kept for TiDB,
which writes them with its DDL and reads them again.

Nothing follows them: a region has one copy, and nobody schedules.

Records have PD's keys and JSON. Rules live in the term's memory; every change is durable before it
is answered. Source: PD pkg/schedule/labeler/rules.go, pkg/schedule/placement/rule.go (what is
refused, and in which words).
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from server.coordinator.keys import ClusterKeys
from server.coordinator.leadership.durable_limit import StateLostError
from server.coordinator.leadership.leadership import MAX_OPS, FencedMetadata
from server.routes import Request
from storage.client_json import read_json
from storage.meta.meta import Delete, KeyValue, Op, Put
from storage.model.errors import InvalidError
from storage.tasks import Changes

Document = dict[str, Any]

DEFAULT_RULE: Document = {
    "group_id": "pd",
    "id": "default",
    "start_key": "",
    "end_key": "",
    "role": "voter",
    "is_witness": False,
    "count": 1,
}
"""PD's first rule, for one copy of each region."""
_ROLES = ("voter", "leader", "follower", "learner")
_OPERATORS = ("in", "notIn", "exists", "notExists")
_MAX_ID_BYTES = 1024


class RuleContentError(InvalidError):
    """A rule that PD would refuse, too; the texts begin with PD's codes."""

    code = "ErrRuleContent"


class RuleStore:
    """The rules of a cluster for one term; `load` before anything else."""

    def __init__(self, metadata: FencedMetadata, keys: ClusterKeys) -> None:
        self._metadata = metadata
        self._keys = keys
        self._changes = Changes()
        self.labels: dict[str, Document] = {}
        """Region label rules by id."""
        self.groups: dict[str, Document] = {}
        """Groups of placement rules that have properties of their own."""
        self.placement: dict[tuple[str, str], Document] = {}
        """Placement rules by group and id."""

    async def load(self) -> None:
        """Read them from the metadata. Raises: StateLostError: one cannot be read."""
        for pair in await self._metadata.get_prefix(self._keys.path("region_label/")):
            rule = _read(pair)
            self.labels[str(rule["id"])] = rule
        for pair in await self._metadata.get_prefix(self._keys.path("rule_group/")):
            group = _read(pair)
            self.groups[str(group["id"])] = group
        for pair in await self._metadata.get_prefix(self._keys.path("rules/")):
            rule = {"group_id": "", **_read(pair)}
            self.placement[str(rule["group_id"]), str(rule["id"])] = rule
        self.placement.setdefault(("pd", "default"), dict(DEFAULT_RULE))

    async def change_labels(self, sets: Sequence[Document], deletes: Iterable[str]) -> None:
        """Delete, then set; durable when it returns."""
        changed = {rule_id: None for rule_id in deletes if rule_id in self.labels} | {
            rule["id"]: rule for rule in sets
        }
        await self._change(self.labels, changed, lambda rule_id: f"region_label/{rule_id}")

    async def change_groups(self, changed: Mapping[str, Document | None]) -> None:
        """Set groups, or remove (None) them; durable when it returns."""
        await self._change(self.groups, changed, lambda group_id: f"rule_group/{group_id}")

    async def change_placement(self, changed: Mapping[tuple[str, str], Document | None]) -> None:
        """Set placement rules, or remove (None) them; durable when it returns."""
        await self._change(self.placement, changed, _rule_tail)

    def of_group(self, group_id: str) -> list[Document]:
        """The placement rules of a group, in PD's order."""
        return self.ordered(
            rule for (owner, _), rule in self.placement.items() if owner == group_id
        )

    def ordered(self, rules: Iterable[Document] | None = None) -> list[Document]:
        """Placement rules by group, index and id; without an argument all of them."""
        chosen = self.placement.values() if rules is None else rules
        return sorted(chosen, key=lambda rule: (rule["group_id"], rule.get("index", 0), rule["id"]))

    async def _change(
        self,
        rules: dict[Any, Document],
        changed: Mapping[Any, Document | None],
        tail: Callable[[Any], str],
    ) -> None:
        await self._changes.make(lambda: self._write(rules, changed, tail))

    async def _write(
        self,
        rules: dict[Any, Document],
        changed: Mapping[Any, Document | None],
        tail: Callable[[Any], str],
    ) -> None:
        items = list(changed.items())
        for at in range(0, len(items), MAX_OPS):
            part = items[at : at + MAX_OPS]
            ops: list[Op] = [
                Delete(self._keys.path(tail(key)))
                if rule is None
                else Put(self._keys.path(tail(key)), _json(rule))
                for key, rule in part
            ]
            # Durable first, then in memory. More rules than a transaction takes are written in
            # parts, each of them complete by itself.
            await self._metadata.txn((), ops)
            for key, rule in part:
                if rule is None:
                    rules.pop(key, None)
                else:
                    rules[key] = rule


def body_of(request: Request) -> Any:
    """The JSON of a request's body. Raises: RuleContentError: it is none."""
    try:
        return read_json(request.body)
    except ValueError as err:
        raise RuleContentError(f"the body is no JSON: {err}") from err


def label_rule(given: Any) -> Document:
    """A region label rule, checked. Raises: RuleContentError."""
    rule = _document(given, "label rule")
    rule_id = _id(
        rule, "id", "[PD:region:ErrRegionRuleContent]invalid region rule content, empty rule id"
    )
    labels = rule.get("labels")
    if not isinstance(labels, list) or not labels:
        raise _bad_label("no region labels")
    if rule.get("rule_type") != "key-range":
        raise _bad_label(f"invalid rule type: {rule.get('rule_type')}")
    data = rule.get("data")
    if not isinstance(data, list) or not data:
        raise _bad_label("no key ranges")
    return {
        "id": rule_id,
        "index": _number(rule, "index"),
        "labels": [_label(label) for label in labels],
        "rule_type": "key-range",
        "data": [_key_range(part) for part in data],
    }


def placement_rule(given: Any) -> Document:
    """A placement rule, checked. Raises: RuleContentError."""
    rule = _document(given, "placement rule")
    empty = (
        "[PD:placement:ErrRuleContent]invalid rule content, group ID and rule ID must not be empty"
    )
    checked: Document = {"group_id": _id(rule, "group_id", empty), "id": _id(rule, "id", empty)}
    if index := _number(rule, "index"):
        checked["index"] = index
    if rule.get("override"):
        checked["override"] = True
    checked |= _key_range(
        {"start_key": rule.get("start_key", ""), "end_key": rule.get("end_key", "")}
    )
    if rule.get("role") not in _ROLES:
        raise _bad_placement(f"invalid role {rule.get('role')}")
    count = _number(rule, "count")
    if count <= 0:
        raise _bad_placement(f"invalid count {count}")
    if rule["role"] == "leader" and count > 1:
        raise _bad_placement(f"define multiple leaders by count {count}")
    checked |= {"role": rule["role"], "is_witness": bool(rule.get("is_witness")), "count": count}
    return checked | _constraints(rule)


def rule_group(given: Any) -> Document:
    """The properties of a group of placement rules, checked. Raises: RuleContentError."""
    group = _document(given, "rule group")
    checked: Document = {
        "id": _id(group, "id", "[PD:placement:ErrRuleContent]invalid rule content, empty group id")
    }
    if index := _number(group, "index"):
        checked["index"] = index
    if group.get("override"):
        checked["override"] = True
    return checked


def _constraints(rule: Document) -> Document:
    checked: Document = {}
    constraints = rule.get("label_constraints") or []
    if not isinstance(constraints, list):
        raise _bad_placement("label_constraints must be a list")
    for constraint in constraints:
        if not isinstance(constraint, dict) or constraint.get("op") not in _OPERATORS:
            raise _bad_placement(f"invalid op {constraint}")
    if constraints:
        checked["label_constraints"] = constraints
    if locations := rule.get("location_labels"):
        if not (isinstance(locations, list) and all(isinstance(label, str) for label in locations)):
            raise _bad_placement("location_labels must be a list of strings")
        checked["location_labels"] = locations
    if isolation := rule.get("isolation_level"):
        checked["isolation_level"] = str(isolation)
    return checked


def _label(given: Any) -> Document:
    label = _document(given, "region label")
    for name in ("key", "value"):
        if not isinstance(label.get(name), str) or not label[name]:
            raise _bad_label(f"empty region label {name}")
    times = {name: str(label[name]) for name in ("ttl", "start_at") if label.get(name)}
    return {"key": label["key"], "value": label["value"], **times}


def _key_range(given: Any) -> Document:
    part = _document(given, "key range")
    bounds: list[bytes] = []
    for name in ("start_key", "end_key"):
        text = part.get(name)
        try:
            bounds.append(
                bytes.fromhex(text) if isinstance(text, str) and " " not in text else _not_hex(text)
            )
        except ValueError as err:
            raise RuleContentError(
                f"[PD:hex:ErrHexDecodingString]decode string {text} error"
            ) from err
    if bounds[1] and bounds[1] <= bounds[0]:
        raise _bad_label("endKey should be greater than startKey")
    return {"start_key": part["start_key"], "end_key": part["end_key"]}


def _not_hex(text: object) -> bytes:
    raise ValueError(text)


def _document(given: Any, name: str) -> Document:
    if not isinstance(given, dict):
        raise RuleContentError(f"a {name} is a JSON object, not {type(given).__name__}")
    return given


def _id(document: Document, name: str, empty: str) -> str:
    value = document.get(name)
    if not isinstance(value, str) or not value:
        raise RuleContentError(empty)
    if len(value.encode(errors="surrogatepass")) > _MAX_ID_BYTES:
        raise RuleContentError(f"{name} has more than {_MAX_ID_BYTES} bytes")
    try:
        value.encode()
    except UnicodeEncodeError as err:
        raise RuleContentError(f"{name} is no Unicode text") from err
    return value


def _number(document: Document, name: str) -> int:
    value = document.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 63:
        raise RuleContentError(f"{name} must be a number, not {value!r}")
    return value


def _rule_tail(key: tuple[str, str]) -> str:
    return f"rules/{key[0].encode().hex()}-{key[1].encode().hex()}"


def _json(rule: Document) -> bytes:
    return json.dumps(rule, separators=(",", ":")).encode()


def _read(pair: KeyValue) -> Document:
    try:
        rule = json.loads(pair.value)
    except (ValueError, RecursionError):
        rule = None
    if not isinstance(rule, dict) or not (
        isinstance(rule.get("id"), str)
        and isinstance(rule.get("group_id", ""), str)
        and isinstance(rule.get("index", 0), int)
    ):
        raise StateLostError(f"the rule at {pair.key!r} cannot be read; correct it, or delete it")
    return rule


def _bad_label(text: str) -> RuleContentError:
    return RuleContentError(f"[PD:region:ErrRegionRuleContent]invalid region rule content, {text}")


def _bad_placement(text: str) -> RuleContentError:
    return RuleContentError(f"[PD:placement:ErrRuleContent]invalid rule content, {text}")
