"""The only place that knows all rooms: command line, configuration, daemons, and the gRPC edges."""
