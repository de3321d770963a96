"""A deterministic simulation of a whole cluster: coordinators, stores, captures, GC workers,
clients and lake jobs in one process, on one virtual clock, with what goes wrong chosen by a seed.

    make sim-cluster SEED=7           one cluster, told step by step
    make sim-cluster SEEDS=1000       many, quietly

Daemons are opened as `tidemark` opens them (`open_coordinator`, `open_store`, `open_capture`,
`open_gc_worker`), and run their real code. `seams` says what is not theirs: the transport between
them, their disks, clocks and threads.

`transport` carries gRPC's calls; `disk` forgets what was not synced; `metadata` stops and comes
back; `machine` starts and kills daemons; `cluster` puts machines together, and does harm to them;
`workload` is what clients do, `history` what is known of it; `lake` reads a changefeed, and keeps
what it read; `checks` says what must hold at every moment; `plants` are bugs that the simulation
must find.
"""
