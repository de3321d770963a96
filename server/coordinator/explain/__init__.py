"""`gc explain` on the leading coordinator: gathers the situation, and answers over gRPC and HTTP."""
