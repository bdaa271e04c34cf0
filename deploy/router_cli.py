"""The command line of a router whose workers run elsewhere."""

from __future__ import annotations

import sys

from settings.command_line import router_config
from settings.environment import quiet_grpc, read_environment
from settings.errors import ConfigError


def main() -> None:
    """Run a router; exits with 0, or 2 for a fault of the command line or the model."""
    quiet_grpc()
    try:
        config = router_config(sys.argv[1:], read_environment())
    except ConfigError as error:
        print(f"python -m router: {error}", file=sys.stderr)
        sys.exit(2)
    from deploy.router import router_main

    sys.exit(router_main(config))
