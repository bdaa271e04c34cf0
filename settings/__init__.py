"""Frozen configuration and the one table of flags."""
