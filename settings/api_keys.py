"""The API keys of a server, from the command line, a file and the environment."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from settings.environment import API_KEY
from settings.errors import ConfigError
from settings.flag_values import to_keys


def read_api_keys(
    given: Sequence[str] | None, file: str | None, variable: str | None
) -> tuple[str, ...]:
    """All keys together: `given` on the command line, one a line of `file`, and those that
    the environment's `variable` holds, separated by commas.

    Raises:
        ConfigError: the file cannot be read or has no key, or a key cannot be sent in a header.
            The message shows no key.
    """
    keys = list(given or ())
    if file is not None:
        keys += _from_file(file)
    if variable is not None:
        keys += _checked(variable, API_KEY)
    return tuple(dict.fromkeys(keys))


def _from_file(file: str) -> list[str]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"--api_key_file={file}: not a text file") from None
    except OSError as error:
        raise ConfigError(f"--api_key_file={file}: {error.strerror}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"--api_key_file={file}: it has no key")
    return [key for line in keys for key in _checked(line, f"--api_key_file={file}")]


def _checked(text: str, where: str) -> tuple[str, ...]:
    try:
        return to_keys(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{where}: {error}") from None
