"""Whose connection it is, as far as a listener can tell: the address of its other end.

One host has one IPv4 address for a port, but a whole /64 of IPv6 addresses, so these count as one
(RFC 6177). Clients behind one NAT or proxy share its address. Who connects by a Unix socket has
passed the file's permissions and none.
"""

import ipaddress

_HOST_BITS = 64


def client_address(peer: object) -> str:
    """What connections of `peer`, a socket's peer name, are counted by;
    empty for a Unix socket's.
    """
    if not isinstance(peer, tuple):
        return ""
    # a link-local address may name its interface
    host = str(peer[0]).partition("%")[0]
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> _HOST_BITS << _HOST_BITS, 128 - _HOST_BITS)))
