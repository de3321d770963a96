"""GC safepoints: `state` holds their rules and keeps them, `explain` shows what blocks GC, `worker`
runs GC rounds.
"""
