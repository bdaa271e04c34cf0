"""`python -m deploy.threads --address unix:/folder --disagg_topo P,D`: all workers, one process.

Their sockets lie in the folder, under the names of `deploy.roster`.
"""

from deploy.worker_cli import threads_main

if __name__ == "__main__":
    threads_main("python -m deploy.threads")
