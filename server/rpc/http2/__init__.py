"""A gRPC server in pure Python: HTTP/2 (RFC 9113), HPACK (RFC 7541),
and gRPC's framing over them.
"""
