"""The engine that both kinds of worker run: no network, no asyncio."""
