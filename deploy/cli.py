"""The command `hexserve`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn, TypeVar

from settings.command_line import chat_config, demo_config, serve_config
from settings.environment import quiet_grpc, read_environment
from settings.errors import ConfigError

if TYPE_CHECKING:
    from deploy.signals import Stop

_T = TypeVar("_T")

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended, by the shells' custom."""

USAGE = """\
usage: hexserve COMMAND [FLAGS]

  serve   serve a model over HTTP           hexserve serve --model demo --disagg_topo=1,1
  demo    serve the demo model and ask it   hexserve demo [--once]
  models  list the models that are served   hexserve models [--markdown]
  chat    talk with a model at a terminal   hexserve chat --url http://127.0.0.1:7080

`hexserve --version` tells the version, `hexserve COMMAND --help` lists the flags.
"""


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C before a command listens for signals itself is no fault to be traced back."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


@_interruptible()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exits with 0, 1 (a failure) or 2 (a fault of the command line)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    command = arguments[0] if arguments else ""
    if command == "serve":
        serve_main(arguments[1:])
    elif command == "demo":
        _demo_main(arguments[1:])
    elif command == "models":
        _models_main(arguments[1:])
    elif command == "chat":
        _chat_main(arguments[1:])
    elif command in ("-h", "--help", "help"):
        print(USAGE)
    elif command == "--version":
        print(f"hexserve {version('hexserve')}")
    else:
        print(USAGE, file=sys.stderr)
        if command:
            print(f"hexserve: no such command: {command!r}", file=sys.stderr)
        sys.exit(2)


@_interruptible()
def serve_main(arguments: Sequence[str], *, as_hex_llm: bool = False) -> None:
    """`hexserve serve`, and `python -m hex_llm.server.api_server`."""
    quiet_grpc()
    config, worker_flags = _configured(
        lambda: serve_config(arguments, read_environment(), as_hex_llm=as_hex_llm)
    )
    from deploy.local import serve

    _run(lambda stop: serve(config, worker_flags, stop), config.log_level)


def _demo_main(arguments: list[str]) -> None:
    quiet_grpc()
    config, worker_flags, once = _configured(lambda: demo_config(arguments, read_environment()))
    from deploy.demo import demo

    _run(lambda stop: demo(config, worker_flags, stop, once=once), config.log_level)


def _models_main(arguments: list[str]) -> None:
    from deploy.models import families, markdown_table, plain_list

    if arguments not in ([], ["--markdown"]):
        _fail(ConfigError(f"models: only --markdown is taken, not {' '.join(arguments)}"), 2)
    print(markdown_table(families()) if arguments else plain_list(families()))


def _chat_main(arguments: list[str]) -> None:
    config = _configured(lambda: chat_config(arguments, read_environment()))
    from deploy.chat import chat

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing

    chat(config)


def _configured(make: Callable[[], _T]) -> _T:
    try:
        return make()
    except ConfigError as error:
        _fail(error, 2)


def _run(main: Callable[[Stop], Awaitable[None]], log_level: str) -> None:
    from checkpoint.errors import CheckpointError
    from deploy.demo import DemoFailed
    from deploy.router import RouterFailed
    from deploy.signals import Stopped, leave, run_until_signalled
    from deploy.supervisor import WorkerDied
    from telemetry.logs import set_up_logging

    set_up_logging(log_level)
    try:
        run_until_signalled(main)
    except (ConfigError, CheckpointError) as error:
        _fail(error, 2)
    except (WorkerDied, RouterFailed, DemoFailed) as error:
        _fail(error, 1)
    except Stopped:
        leave(0)


def _fail(error: Exception, code: int) -> NoReturn:
    print(f"hexserve: {error}", file=sys.stderr)
    sys.exit(code)
