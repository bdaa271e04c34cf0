"""`python -m deploy.colocated`: a worker that does both, prefill and decode."""

from deploy.worker_cli import main
from engine.types import COLOCATED

if __name__ == "__main__":
    main(COLOCATED, "python -m deploy.colocated")
