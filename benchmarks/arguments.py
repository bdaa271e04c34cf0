"""Types of command line arguments."""

import argparse


def positive_int(text: str) -> int:
    """An integer of at least 1. Raises ArgumentTypeError, ValueError."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def positive(text: str) -> float:
    """A finite number above 0. Raises ArgumentTypeError, ValueError."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0")
    return value
