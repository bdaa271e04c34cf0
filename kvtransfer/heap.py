"""How the process's allocator treats buffers of megabytes."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

LARGEST_KEPT = 32 << 20
"""In bytes; the most that every glibc takes. Larger buffers are mapped each on its own."""
MOST_KEPT = 256 << 20
"""Freed bytes at the end of the main thread's heap that stay with the process."""


def keep_freed_buffers() -> bool:
    """Have freed buffers used again instead of given back; False where this is not glibc.

    It is of use to the thread that the process began with: the event loop's. Each chunk of KV
    is a few buffers of megabytes. By default glibc maps such a buffer, the kernel clears its
    pages one by one at the first touch, and all of it is unmapped at the end: measured, half of
    the time of a transfer by gRPC.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(_M_TRIM_THRESHOLD, MOST_KEPT))
