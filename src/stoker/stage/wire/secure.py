"""TLS records in C: Python's `ssl` connects and checks certificates, OpenSSL's own functions read.

Through `SSLSocket.recv_into` a record of 16 KiB costs a turn of the interpreter, which for a fast store is
twice the CPU of decrypting it. So `flight.c` is lent the functions of the very OpenSSL that Python has
loaded, and the connection's SSL. Where that is stands in a record of CPython's: it is believed only where the
field beside it is the connection's context, and OpenSSL names the same socket. Anywhere else (another
interpreter, OpenSSL linked in without its names) Python reads as it always did.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from stoker.native import native

_NAMES = ("SSL_read", "SSL_write", "SSL_get_error", "ERR_clear_error", "ERR_peek_error", "SSL_pending")
_SSL, _CONTEXT = 3, 4  # words into CPython's PySSLSocket, after its head of two and a weak reference


def tls_handle(plug: Any) -> int:  # an ssl.SSLSocket, whose private half has no type
    """The SSL of a secured socket, for `flight.c`; 0 where it cannot be had."""
    library = _lent()
    inner = getattr(plug, "_sslobj", None)
    if library is None or type(inner).__name__ != "_SSLSocket" or type(inner).__basicsize__ < 64:
        return 0
    words = (ctypes.c_size_t * (_CONTEXT + 1)).from_address(id(inner))
    if words[_CONTEXT] != id(plug.context):
        return 0
    handle = words[_SSL]
    return handle if library.SSL_get_fd(ctypes.c_void_p(handle)) == plug.fileno() else 0


@cache
def can_lend_tls() -> bool:
    """Whether secured sockets have a handle here, as a connection that nobody uses says."""
    import socket
    import ssl

    if _lent() is None:
        return False
    one, other = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with other, context.wrap_socket(one, server_hostname="x", do_handshake_on_connect=False) as plug:
        return bool(tls_handle(plug))


@cache
def _lent() -> ctypes.CDLL | None:
    """OpenSSL as Python has it, its functions lent to `flight.c`; None where there is no such thing."""
    import sys

    flight = native("stage.wire._flight")
    if flight is None or sys.implementation.name != "cpython":
        return None
    try:
        import _ssl

        library = ctypes.CDLL(_ssl.__file__)  # it is loaded already; what it needs is found through it
        places = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _NAMES]
        library.SSL_get_fd.restype = ctypes.c_int
    except (ImportError, AttributeError, OSError):
        return None
    flight.lend(*places)
    return library
