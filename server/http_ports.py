"""Where each daemon answers HTTP unless its `http-addr` says otherwise, by its section of the
configuration.

It is apart from the daemons so that `tidemark health`, which probes run every few seconds, need not
import one.
"""

from typing import Final

HTTP_ADDRS: Final = {
    "coordinator": "127.0.0.1:8391",
    "store": "127.0.0.1:20180",
    "capture": "127.0.0.1:8303",
    "pump": "127.0.0.1:8251",
    "gc-worker": "127.0.0.1:8392",
    "up": "127.0.0.1:8390",
    "spark": "127.0.0.1:0",
    "spark-keep": "127.0.0.1:8394",
}
"""Port 0: the kernel chooses, as many such jobs run side by side."""
