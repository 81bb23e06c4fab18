"""Whether a process that does nothing may be waiting for storage: by the system calls that its threads are in (Linux).

What a process has written goes to the disks under nobody's name, so that others' writing would hide for long that it sleeps.
"""

from __future__ import annotations

import os
import platform

from packtrain.launch.processes import sight, text_of

_NOT_FOR_STORAGE = {
    "x86_64": "read 0 poll 7 select 23 pause 34 nanosleep 35 accept 43 recvfrom 45 recvmsg 47 wait4 61 rt_sigtimedwait 128 "
    "rt_sigsuspend 130 futex 202 clock_nanosleep 230 epoll_wait 232 waitid 247 pselect6 270 ppoll 271 epoll_pwait 281 "
    "accept4 288 recvmmsg 299 epoll_pwait2 441 futex_waitv 449 futex_wait 455",
    "aarch64": "epoll_pwait 22 read 63 pselect6 72 ppoll 73 waitid 95 futex 98 nanosleep 101 clock_nanosleep 115 "
    "rt_sigsuspend 133 rt_sigtimedwait 137 accept 202 recvfrom 207 recvmsg 212 accept4 242 recvmmsg 243 wait4 260 "
    "epoll_pwait2 441 futex_waitv 449 futex_wait 455",
}
"""By machine: calls that wait for time, other threads and processes, and sockets; reading counts its bytes. Any other call may
be one that writes (write, fsync, close, rename, io_uring_enter …)."""
_ELSEWHERE = frozenset(_NOT_FOR_STORAGE.get(platform.machine(), "").split()[1::2])


def may_wait_for_storage(pid: int) -> bool | None:
    """Whether any thread of the process may be writing, or waits for a disk; None where the system does not tell."""
    if sight(pid).state == "D":
        return True
    threads = f"/proc/{pid}/task"
    try:
        calls = [text_of(f"{threads}/{thread}/syscall").split(" ", 1)[0] for thread in os.listdir(threads)]
    except OSError:
        return None
    calls = [
        one.strip() for one in calls if one.strip() not in ("", "running")
    ]  # a thread that runs is seen by its CPU time
    return any(one not in _ELSEWHERE for one in calls) if _ELSEWHERE and calls else None
