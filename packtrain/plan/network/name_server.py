"""A name server that does not answer: torch asks for the name of every address that it connects to, for 10 s each, in silence.

TCPStore, gloo and torchrun look names up only to show them in their logs, but they wait for them: with the usual settings of glibc
(5 s, two attempts, for each server in /etc/resolv.conf) a start takes 20 s longer, and nothing says why. torch's one
trace of it is "The hostname of the client socket cannot be retrieved".
"""

from __future__ import annotations

import os
import socket
import sys
import threading

LOOPBACK = "127.0.0.1"
LIMIT_S = 1.0
"""Seconds within which any name server of use has answered."""
FIX = "mend the servers in /etc/resolv.conf, or give the addresses names in /etc/hosts as torch asks for them: ::ffff:10.0.0.1 n1"
_OPTIONS, _SHORT = "RES_OPTIONS", "timeout:1 attempts:1"


def silence_for(address: str) -> str:
    """What holds up every connection to or from `address` (or a name of it), in words; "" where it is looked up in no time."""
    thread = threading.Thread(target=_look_up, args=(address,), name="look-up", daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return f"the name server does not answer for {address}" if thread.is_alive() else ""


def short_waits(address: str) -> dict[str, str]:
    """Variables with which processes that connect to `address` wait for a silent name server 1 s instead of 10; {} where none
    is silent. Says so; the user's own RES_OPTIONS stay."""
    silent = silence_for(address)
    if not silent:
        return {}
    own = os.environ.get(_OPTIONS)
    waits = f"as long as RES_OPTIONS={own!r} says" if own else f"only 1 s from now on (RES_OPTIONS={_SHORT!r})"
    print(f"{silent}, and torch asks it at each connection: it waits {waits}\n    → {FIX}", file=sys.stderr, flush=True)
    return {} if own else {_OPTIONS: _SHORT}


def _look_up(address: str) -> None:
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0]
        mapped = str(found) if ":" in str(found) else f"::ffff:{found}"  # torch's sockets speak IPv6
        socket.gethostbyaddr(mapped)  # not getnameinfo, which holds all threads up in Python 3.11.2
    except OSError:  # no such name: that is known at once, and told elsewhere
        pass
