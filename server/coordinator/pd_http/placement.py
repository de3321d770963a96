"""Routes of placement rules: rules, groups, and bundles of a group with its rules,
as TiDB and pd-ctl send them.
"""

from collections.abc import Sequence
from typing import Any

from server.coordinator.cluster.rules import (
    Document,
    RuleContentError,
    body_of,
    placement_rule,
    rule_group,
)
from server.coordinator.term import LeaderTerm
from server.routes import Answer, Request, json_answer

Changes = dict[tuple[str, str], Document | None]


async def all_rules(term: LeaderTerm, _request: Request, _: Sequence[str]) -> Answer:
    """All rules."""
    return json_answer(term.rules.ordered())


async def set_rules(term: LeaderTerm, request: Request, _: Sequence[str]) -> Answer:
    """Set all rules of the body."""
    rules = [placement_rule(rule) for rule in _list(body_of(request))]
    await term.rules.change_placement({(rule["group_id"], rule["id"]): rule for rule in rules})
    return json_answer("Update rules successfully.")


async def batch(term: LeaderTerm, request: Request, _: Sequence[str]) -> Answer:
    """Add and delete rules, in order."""
    changes: Changes = {}
    for op in _list(body_of(request)):
        action = op.get("action") if isinstance(op, dict) else None
        if action == "add":
            rule = placement_rule(op)
            changes[rule["group_id"], rule["id"]] = rule
        elif action == "del":
            _delete(term, changes, op)
        else:
            raise RuleContentError(f"action must be add or del, not {action!r}")
    await term.rules.change_placement(changes)
    return json_answer("Batch operations successfully.")


async def rules_of_group(term: LeaderTerm, _request: Request, arguments: Sequence[str]) -> Answer:
    """The rules of a group."""
    return json_answer(term.rules.of_group(arguments[0]))


async def get_rule(term: LeaderTerm, _request: Request, arguments: Sequence[str]) -> Answer:
    """One rule."""
    rule = term.rules.placement.get((arguments[0], arguments[1]))
    return (
        json_answer(rule)
        if rule
        else json_answer("[PD:placement:ErrRuleNotFound]rule not found", 404)
    )


async def set_rule(term: LeaderTerm, request: Request, _: Sequence[str]) -> Answer:
    """Set one rule."""
    rule = placement_rule(body_of(request))
    await term.rules.change_placement({(rule["group_id"], rule["id"]): rule})
    return json_answer("Update rule successfully.")


async def delete_rule(term: LeaderTerm, _request: Request, arguments: Sequence[str]) -> Answer:
    """Remove one rule; removing an absent one is no error, as in PD."""
    key = (arguments[0], arguments[1])
    if key in term.rules.placement:
        await term.rules.change_placement({key: None})
    return json_answer("Delete rule successfully.")


async def all_groups(term: LeaderTerm, _request: Request, _: Sequence[str]) -> Answer:
    """All groups that have properties."""
    return json_answer(
        sorted(term.rules.groups.values(), key=lambda group: (group.get("index", 0), group["id"]))
    )


async def get_group(term: LeaderTerm, _request: Request, arguments: Sequence[str]) -> Answer:
    """A group's properties."""
    group = term.rules.groups.get(arguments[0])
    return json_answer(group, 200 if group else 404)


async def set_group(term: LeaderTerm, request: Request, _: Sequence[str]) -> Answer:
    """Set a group's properties."""
    group = rule_group(body_of(request))
    await term.rules.change_groups({group["id"]: group})
    return json_answer("Update rule group successfully.")


async def delete_group(term: LeaderTerm, _request: Request, arguments: Sequence[str]) -> Answer:
    """Remove a group's properties; its rules stay."""
    if arguments[0] in term.rules.groups:
        await term.rules.change_groups({arguments[0]: None})
    return json_answer("Delete rule group successfully.")


async def bundles(term: LeaderTerm, _request: Request, _: Sequence[str]) -> Answer:
    """Every group with its rules."""
    names = {group_id for group_id, _ in term.rules.placement} | set(term.rules.groups)
    listed = [_bundle(term, name) for name in names]
    return json_answer(
        sorted(listed, key=lambda bundle: (bundle["group_index"], bundle["group_id"]))
    )


async def set_bundles(term: LeaderTerm, request: Request, _: Sequence[str]) -> Answer:
    """Set groups with their rules; without `?partial=true` all other groups are removed."""
    given = [_checked_bundle(bundle) for bundle in _list(body_of(request))]
    partial = request.query.get("partial", ["false"])[0] == "true"
    named = {bundle["group_id"] for bundle in given}
    gone = (
        set()
        if partial
        else {group_id for group_id, _ in term.rules.placement} | set(term.rules.groups)
    )
    await _replace(term, given, gone - named)
    return json_answer("Update rules and groups successfully.")


async def get_bundle(term: LeaderTerm, _request: Request, arguments: Sequence[str]) -> Answer:
    """A group with its rules."""
    return json_answer(_bundle(term, arguments[0]))


async def set_bundle(term: LeaderTerm, request: Request, arguments: Sequence[str]) -> Answer:
    """Set a group with its rules."""
    given = body_of(request)
    bundle = _checked_bundle(
        {"group_id": arguments[0], **given} if isinstance(given, dict) else given
    )
    if bundle["group_id"] != arguments[0]:
        raise RuleContentError(
            f"group id {bundle['group_id']} does not match request URI {arguments[0]}"
        )
    await _replace(term, [bundle], set())
    return json_answer("Update group and rules successfully.")


async def delete_bundle(term: LeaderTerm, _request: Request, arguments: Sequence[str]) -> Answer:
    """Remove a group with its rules."""
    await _replace(term, [], {arguments[0]})
    return json_answer("Delete group and rules successfully.")


ROUTES: dict[str, dict[str, Any]] = {
    "config/rules": {"GET": all_rules, "POST": set_rules},
    "config/rules/batch": {"POST": batch},
    "config/rules/group/{}": {"GET": rules_of_group},
    "config/rule": {"POST": set_rule},
    "config/rule/{}/{}": {"GET": get_rule, "DELETE": delete_rule},
    "config/rule_groups": {"GET": all_groups},
    "config/rule_group": {"GET": all_groups, "POST": set_group},
    "config/rule_group/{}": {"GET": get_group, "DELETE": delete_group},
    "config/placement-rule": {"GET": bundles, "POST": set_bundles},
    "config/placement-rule/{}": {"GET": get_bundle, "POST": set_bundle, "DELETE": delete_bundle},
}


def _delete(term: LeaderTerm, changes: Changes, op: Document) -> None:
    group_id, rule_id = str(op.get("group_id", "")), str(op.get("id", ""))
    if not op.get("delete_by_id_prefix"):
        changes[group_id, rule_id] = None
        return
    for owner, name in {*term.rules.placement, *changes}:
        if owner == group_id and name.startswith(rule_id):
            changes[owner, name] = None


def _bundle(term: LeaderTerm, group_id: str) -> Document:
    group = term.rules.groups.get(group_id, {})
    return {
        "group_id": group_id,
        "group_index": group.get("index", 0),
        "group_override": group.get("override", False),
        "rules": term.rules.of_group(group_id),
    }


def _checked_bundle(given: Any) -> Document:
    if not isinstance(given, dict):
        raise RuleContentError("a group of rules is a JSON object")
    group_id = given.get("group_id") or given.get("id")
    properties = {
        "id": group_id,
        "index": given.get("group_index", 0),
        "override": given.get("group_override", False),
    }
    group = rule_group(properties)
    rules = [
        placement_rule({**rule, "group_id": group["id"]} if isinstance(rule, dict) else rule)
        for rule in _list(given.get("rules") or [])
    ]
    return {"group_id": group["id"], "group": group, "rules": rules}


async def _replace(term: LeaderTerm, given: Sequence[Document], gone: set[str]) -> None:
    """Let the given groups have these rules and no others, and remove the groups in `gone`."""
    replaced = {bundle["group_id"] for bundle in given} | gone
    changes: Changes = {key: None for key in term.rules.placement if key[0] in replaced}
    groups: dict[str, Document | None] = {
        name: None for name in term.rules.groups if name in replaced
    }
    for bundle in given:
        group = bundle["group"]
        if len(group) > 1:
            groups[group["id"]] = group
        changes |= {(group["id"], rule["id"]): rule for rule in bundle["rules"]}
    await term.rules.change_placement(changes)
    await term.rules.change_groups(groups)


def _list(given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise RuleContentError("the body is a JSON list")
    return given
