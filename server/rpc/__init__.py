"""The gRPC edge: servers, channels, batched unary calls, status codes, credentials."""
