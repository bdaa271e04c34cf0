"""The keys of a server, from the command line, a file and the environment."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from settings.environment import ADMIN_KEY, API_KEY
from settings.errors import ConfigError
from settings.flag_values import to_keys


def read_api_keys(
    given: Sequence[str] | None, file: str | None, variable: str | None
) -> tuple[str, ...]:
    """All keys for the API together: `given` on the command line, one a line of `file`, and those
    that the environment's `variable` holds, separated by commas.

    Raises:
        ConfigError: the file cannot be read or has no key, or a key cannot be sent in a header.
            The message shows no key.
    """
    return _together(given, file, variable, "--api_key_file", API_KEY)


def read_admin_keys(
    given: Sequence[str] | None, file: str | None, variable: str | None, api_keys: Sequence[str]
) -> tuple[str, ...]:
    """As `read_api_keys`, for `/admin`: none of them is one of `api_keys`, which clients have.

    Raises:
        ConfigError: as there; or one is an API key.
    """
    keys = _together(given, file, variable, "--admin_key_file", ADMIN_KEY)
    if set(keys) & set(api_keys):
        raise ConfigError("--admin_key: one of them is an API key as well, which clients have")
    return keys


def _together(
    given: Sequence[str] | None, file: str | None, variable: str | None, flag: str, name: str
) -> tuple[str, ...]:
    keys = list(given or ())
    if file is not None:
        keys += _from_file(file, flag)
    if variable is not None:
        keys += _checked(variable, name)
    return tuple(dict.fromkeys(keys))


def _from_file(file: str, flag: str) -> list[str]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{flag}={file}: not a text file") from None
    except OSError as error:
        raise ConfigError(f"{flag}={file}: {error.strerror}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"{flag}={file}: it has no key")
    return [key for line in keys for key in _checked(line, f"{flag}={file}")]


def _checked(text: str, where: str) -> tuple[str, ...]:
    try:
        return to_keys(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{where}: {error}") from None
