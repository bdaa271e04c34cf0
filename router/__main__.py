"""`python -m router --model M --workers unix:/a,host:port`."""

from deploy.router_cli import main

if __name__ == "__main__":
    main()
