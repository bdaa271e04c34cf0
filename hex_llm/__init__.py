"""The name under which users of the Hex-LLM container start their server."""
