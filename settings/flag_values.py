"""What a flag's text stands for. Each raises ArgumentTypeError, which names text and limit."""

from __future__ import annotations

import argparse

from settings.config import KV_TRANSPORTS
from settings.environment import LOG_LEVELS

MOST_SECONDS = 86_400
MOST_STEP_SECONDS = 300
"""Then routers have given a worker up."""


def to_whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number is wanted") from None


def to_positive(text: str) -> int:
    value = to_whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 is wanted")
    return value


def to_seed(text: str) -> int:
    value = to_whole(text)
    if not 0 <= value < 2**64:
        raise argparse.ArgumentTypeError(f"{text}: a seed from 0 to 2**64 - 1 is wanted")
    return value


def to_port(text: str) -> int:
    value = to_whole(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{text}: a port from 0 to 65535 is wanted")
    return value


def to_share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: a number is wanted") from None
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text}: a share above 0 and at most 1 is wanted")
    return value


def to_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: seconds are wanted") from None
    if not 0.0 <= value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text}: seconds from 0 to {MOST_SECONDS} are wanted")
    return value


def to_step_limit(text: str) -> float:
    value = to_seconds(text)
    if not 1.0 <= value <= MOST_STEP_SECONDS:
        raise argparse.ArgumentTypeError(f"{text}: 1 to {MOST_STEP_SECONDS} seconds are wanted")
    return value


def to_cpus(text: str) -> tuple[int, ...]:
    cores = tuple(to_whole(part) for part in text.split(","))
    if min(cores) < 0:
        raise argparse.ArgumentTypeError(f"{text}: cores count from 0")
    return cores


def to_addresses(text: str) -> tuple[str, ...]:
    addresses = tuple(part.strip() for part in text.split(","))
    if not all(addresses):
        raise argparse.ArgumentTypeError(f"{text!r}: an address is empty")
    for address in addresses:
        if not _is_address(address):
            raise argparse.ArgumentTypeError(f"{address!r} is neither unix:/path nor host:port")
    if len(set(addresses)) < len(addresses):
        raise argparse.ArgumentTypeError(f"{text!r}: an address is given twice")
    return addresses


def _is_address(text: str) -> bool:
    if text.startswith("unix:"):
        return text.startswith("unix:/")
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536


def to_transports(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    wrong = [name for name in names if name not in KV_TRANSPORTS]
    if wrong or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"{text!r}: some of {', '.join(KV_TRANSPORTS)} are wanted, each once"
        )
    return names


def to_names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r}: a name is empty")
    return names


def to_keys(text: str) -> tuple[str, ...]:
    """API keys. No error shows one."""
    keys = tuple(part.strip() for part in text.split(","))
    for number, key in enumerate(keys, 1):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise argparse.ArgumentTypeError(
                f"key {number} of {len(keys)}: printable ASCII characters without spaces are "
                "wanted, at least one"
            )
    return keys


def to_temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: a number is wanted") from None
    if not 0.0 <= value <= 2.0:
        raise argparse.ArgumentTypeError(f"{text}: a temperature from 0 to 2 is wanted")
    return value


def to_level(text: str) -> str:
    if text.upper() not in LOG_LEVELS:
        raise argparse.ArgumentTypeError(f"{text}: one of {', '.join(LOG_LEVELS)} is wanted")
    return text.upper()
