"""GC safepoints: `state` holds their rules and keeps them, `explain` shows the blockers of GC,
`worker` runs GC rounds.
"""
