"""`python -m hex_llm.server.api_server FLAGS` is `hexserve serve FLAGS`."""

import sys

from deploy.cli import serve_main

if __name__ == "__main__":
    serve_main(sys.argv[1:], as_hex_llm=True)
