"""The command line of one worker process."""

from __future__ import annotations

import sys

from engine.types import Role
from settings.command_line import worker_config
from settings.environment import quiet_grpc, read_environment
from settings.errors import ConfigError


def main(roles: Role, prog: str) -> None:
    """Run a worker with `roles`; exits with 0, or 2 for a fault of the command line."""
    quiet_grpc()
    try:
        config = worker_config(sys.argv[1:], read_environment(), prog=prog)
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        sys.exit(2)
    from deploy.worker import worker_main

    worker_main(config, roles)
