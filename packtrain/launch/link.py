"""How good the way to another machine is, by what the system's own TCP says of the line to its launcher.

A link that delays or loses packets stops nothing: every step only takes longer, and nobody is to blame. But TCP counts what
it sends again and how long answers take, so each beat of the line, small as it is, measures the way for nothing. Linux only.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass

_REMEMBERED = 10
_FEWEST = 5
_TOO_MANY = 0.2
_TOO_SLOW_S = 1.0
_SHORTEST_S = 0.1  # that is told in seconds
_RTT, _SENT_AGAIN, _SENT = 68, 100, 156  # bytes before these fields of struct tcp_info
_SIZE = 160


@dataclass(frozen=True, slots=True)
class _Counts:
    rtt_s: float
    sent: int
    again: int


class LinkWatch:
    """The way to one machine, as `look` has seen it lately."""

    def __init__(self) -> None:
        self._seen: deque[_Counts] = deque(maxlen=_REMEMBERED)
        self._told = False

    def look(self, info: bytes) -> str | None:
        """What is wrong with the way, in words, once; `info` is the connection's struct tcp_info, b"" where there is none.

        Called once a beat: the last _REMEMBERED of them count.
        """
        if len(info) < _SIZE or self._told:
            return None
        rtt, again, sent = (struct.unpack_from("I", info, place)[0] for place in (_RTT, _SENT_AGAIN, _SENT))
        self._seen.append(_Counts(rtt / 1e6, sent, again))
        first, last = self._seen[0], self._seen[-1]
        sent, again = last.sent - first.sent, last.again - first.again
        lossy = sent >= _FEWEST and again > _TOO_MANY * sent
        if last.rtt_s < _TOO_SLOW_S and not lossy:
            return None
        self._told = True
        takes = f"{last.rtt_s:.1f} s" if last.rtt_s >= _SHORTEST_S else f"{1e3 * last.rtt_s:.2g} ms"
        return f"an answer takes {takes}, and {again} of {sent} packets had to be sent again"
