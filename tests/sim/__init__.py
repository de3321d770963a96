"""A deterministic simulation of captures: the product's own owner, maintainers, placement,
checkpoints and leases run over simulated time, network and sources.

    make sim SEED=7          one cluster, told step by step
    make sim SEEDS=1000      many, quietly

`clock` is the event loop whose time is the simulation's; `network` what lies between a capture and
the metadata; `source` a log with chunks of a dump, and the processor that reads it; `cluster` puts
captures together and does harm to them; `checks` says what must hold at every moment; `plants` are
bugs that the simulation must find.
"""
