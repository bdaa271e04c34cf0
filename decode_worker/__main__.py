"""`python -m decode_worker --model M --address unix:/path|host:port`."""

from deploy.worker_cli import main
from engine.types import Role

if __name__ == "__main__":
    main(Role.DECODE, "python -m decode_worker")
