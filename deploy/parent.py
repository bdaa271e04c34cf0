"""A worker's tie to the process that has started it: it ends with that one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

from deploy.signals import Stop

_PR_SET_PDEATHSIG = 1


class Parent:
    """Watches standard input, which the parent holds open for as long as it lives.

    Attributes:
        gone: standard input has closed.
    """

    def __init__(self, stop: Stop) -> None:
        """Asks `stop` for an end without grace when the parent is gone. On the loop."""
        self.gone = False
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        if sys.platform == "linux":
            # One that is stopped (SIGSTOP) must wake up to see that it is alone.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
        threading.Thread(target=self._watch, name="stdin", daemon=True).start()

    def _watch(self) -> None:
        while os.read(0, 4096):
            pass
        self.gone = True
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._stop.set()
        self._stop.now.set()  # who asked for it all is gone

    def clean_up_after(self, address: str) -> None:
        """Remove the folder of a Unix socket if the parent, whose it was, is gone.

        The last worker finds it empty and does; of a folder with anything in it nothing is lost.
        """
        if self.gone and address.startswith("unix:"):
            path = Path(address.removeprefix("unix:"))
            with contextlib.suppress(OSError):
                (path if path.is_dir() else path.parent).rmdir()
