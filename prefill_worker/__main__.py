"""`python -m prefill_worker --model M --address unix:/path|host:port`."""

from deploy.worker_cli import main
from engine.types import Role

if __name__ == "__main__":
    main(Role.PREFILL, "python -m prefill_worker")
