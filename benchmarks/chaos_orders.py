"""What the chaos run tells worker processes to do to themselves, and at which moment.

A worker knows nothing of it: `interpose` writes a module that Python imports at the start of
every process below, and that obeys (benchmarks.chaos_agent). Orders come by a datagram socket
named after the process.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtransfer.messages import Admitted, ChunkHeader, Claim, Done, Pull
from kvtransfer.protocol import FROM_READER, State

WORKERS = ("prefill_worker", "decode_worker", "deploy.colocated")
"""The modules that are interposed."""
PROCESS = "process"
SESSION = "session"
"""The messages of sessions with routers, either way; and their connections."""
MESSAGES: dict[State, type] = {
    State.CONNECTED: Claim,
    State.CLAIMED: Admitted,
    State.ADMITTED: Pull,
    State.STREAMING: ChunkHeader,
    State.ENDED: Done,
}
"""State of a transfer → the message that is harmed in it."""
ANSWERS_AT = "run"
"""The name of the socket that is told of orders done."""


class Harm(enum.Enum):
    """What happens to a process, by the signal's name, or to a message or its connection."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    END = "SIGTERM"
    RESET = "reset"
    DELAY = "delay"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class Order:
    """`harm` to `what`: PROCESS, the next message or all connections of SESSION, or the next
    message of a transfer whose type has that name.

    `at`: not before a sequence of the engine enters the state of that name; "" is at once.
    """

    number: int
    harm: Harm
    what: str
    seconds: float = 0.0
    at: str = ""

    def encode(self) -> bytes:
        return json.dumps({**asdict(self), "harm": self.harm.value}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Order:
        fields = json.loads(data)
        return cls(**{**fields, "harm": Harm(fields["harm"])})


def role_of(state: State, harm: Harm) -> str:
    """The role of the worker that can do it: who receives the message, or packs the chunk."""
    message = MESSAGES[state]
    at_source = message in FROM_READER or (message, harm) == (ChunkHeader, Harm.CORRUPT)
    return "prefill" if at_source else "decode"


def interpose(folder: Path) -> None:
    """Write into `folder`, for PYTHONPATH, what brings workers under orders from there."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        f"if any(name in sys.orig_argv for name in {WORKERS!r}):\n"
        "    from benchmarks.chaos_agent import obey\n"
        f"    obey({str(folder)!r})\n"
    )
