"""The command line of a router whose workers run elsewhere."""

from __future__ import annotations

import asyncio
import logging
import sys

from checkpoint.errors import CheckpointError
from checkpoint.source import resolve
from deploy.router import listen, running_router
from deploy.signals import run_until_signalled
from settings.command_line import router_config
from settings.config import RouterConfig
from settings.environment import read_environment
from settings.errors import ConfigError
from telemetry.logs import set_up_logging

log = logging.getLogger("hexserve.router")


def main() -> None:
    """Run a router; exits with 0, or 2 for a fault of the command line or the model."""
    try:
        config = router_config(sys.argv[1:], read_environment())
        set_up_logging(config.log_level)
        run_until_signalled(lambda stop: _serve(config, stop))
    except (ConfigError, CheckpointError) as error:
        print(f"python -m router: {error}", file=sys.stderr)
        sys.exit(2)


async def _serve(config: RouterConfig, stop: asyncio.Event) -> None:
    listener = listen(config.http)
    folder = await asyncio.to_thread(
        resolve, config.model.model, config.cache, config.model.revision
    )
    async with running_router(
        listener, folder, config.model, config.http, config.workers, config.cache
    ) as router:
        log.info("listening at %s, %d workers are listed", router.url, len(config.workers))
        await stop.wait()
