"""`tidemark cli verify`: whether a lake equals its upstream at a cut,
and where it does not (docs/design/0025).

`verify` leads through it: `catalog` names the tables, `upstream` and `lake` give their rows,
`comparison` finds those that differ. `audit_plan` spreads the same work over time
(docs/design/0030).
"""
