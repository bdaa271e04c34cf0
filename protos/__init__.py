"""The wire between routers and workers: messages, codec, session client and server."""
