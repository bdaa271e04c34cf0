"""KV blocks in, token stream out."""
