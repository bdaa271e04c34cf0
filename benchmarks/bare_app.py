"""A bare ASGI application that streams fixed events: what the server under the router can do.

    python -m benchmarks.bare_app --events FILE

Every POST is answered by the events of FILE, each sent by itself, on the server that the router
runs on. Between two of them the other streams have their turn, as they have between tokens.
Ends with its standard input.
"""

import argparse
import asyncio
import socket
import sys
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_END = b"\n\n"


def split_events(stream: bytes) -> list[bytes]:
    """The server-sent events of a stream, each with its end."""
    *events, rest = stream.split(_END)
    if rest:
        raise ValueError(f"the stream ends amid an event: {rest[:60]!r}")
    return [event + _END for event in events]


def bare_app(events: list[bytes]) -> ASGIApp:
    """The application."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    return app


async def serve(events: list[bytes]) -> None:
    """Until standard input ends."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        server = uvicorn.Server(
            uvicorn.Config(
                bare_app(events),
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
            )
        )
        loop = asyncio.get_running_loop()

        def stop() -> None:
            server.should_exit = True

        loop.add_reader(sys.stdin.fileno(), stop)
        print(f"listening at http://127.0.0.1:{listener.getsockname()[1]},", flush=True)
        await server.serve(sockets=[listener])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bare_app")
    parser.add_argument("--events", type=Path, required=True)
    args = parser.parse_args()
    uvloop.run(serve(split_events(args.events.read_bytes())))


if __name__ == "__main__":
    main()
