"""The only place that knows all rooms: command line, configuration, daemons, and the gRPC edges."""

import os

# gRPC's C core restarts its threads in every child of fork(), and crashes there when calls were
# under way. We fork only to exec another program, which needs none of it. The core reads this when
# it starts, so it is said before any import.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
