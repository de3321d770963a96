"""GC safepoints: `state` holds their rules and keeps them, `explain` says who blocks GC,
`worker` runs GC rounds.
"""
