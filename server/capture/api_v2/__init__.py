"""TiCDC's HTTP API, `/api/v2/…`, on the capture's gRPC port (docs/design/0033-http-api.md)."""
