"""Prompt in, KV blocks and first token out."""
