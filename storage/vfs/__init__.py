"""The seam between storage and the disk: a few calls with exact durability, real,
or in memory where they can crash.

`memory.MemFS.crash_clone` keeps exactly what must survive a crash and forgets the rest,
`hooked.HookedFS` makes chosen calls fail: together they test every path that is rare on a real
disk.
"""
