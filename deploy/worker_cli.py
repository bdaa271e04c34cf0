"""The command lines of worker processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from deploy.roster import PlannedWorker, plan_workers
from engine.types import Role
from settings.command_line import threads_config, worker_config
from settings.config import WorkerConfig
from settings.environment import Environment, quiet_grpc, read_environment
from settings.errors import ConfigError

_T = TypeVar("_T")


def main(roles: Role, prog: str) -> None:
    """Run a worker with `roles`; exits with 0, or 2 for a fault of the command line."""
    config = _configured(worker_config, prog)
    _run(config, [PlannedWorker(str(roles), roles, config.address)])


def threads_main(prog: str) -> None:
    """Run all workers of a topology in this process; exits as `main` does."""
    config, topology, replicas = _configured(threads_config, prog)
    _run(config, plan_workers(topology, Path(config.address.removeprefix("unix:")), replicas))


def _configured(configure: Callable[[Sequence[str], Environment, str], _T], prog: str) -> _T:
    quiet_grpc()
    try:
        return configure(sys.argv[1:], read_environment(), prog)
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        sys.exit(2)


def _run(config: WorkerConfig, workers: Sequence[PlannedWorker]) -> None:
    from deploy.worker import worker_main

    worker_main(config, workers)
