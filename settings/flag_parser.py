"""From a command line to the values of flags, and back. Names may be written with - or _."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from settings.errors import ConfigError
from settings.flag_values import (
    to_addresses,
    to_cpus,
    to_keys,
    to_level,
    to_names,
    to_port,
    to_positive,
    to_seconds,
    to_seed,
    to_share,
    to_step_limit,
    to_transports,
    to_whole,
)
from settings.flags import Flag, Group


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


_METAVARS: dict[Callable[[str], Any] | None, str] = {
    to_whole: "N",
    to_positive: "N",
    to_seed: "N",
    to_port: "PORT",
    to_share: "X",
    to_seconds: "S",
    to_step_limit: "S",
    to_cpus: "N,…",
    to_level: "LEVEL",
    to_addresses: "ADDRESS,…",
    to_keys: "KEY,…",
    to_names: "NAME,…",
    to_transports: "NAME,…",
}


def _add(parser: argparse._ArgumentGroup, flag: Flag) -> None:
    help = flag.help
    if flag.default is not None:
        help += f" (default: {_spell(flag.default)})"
    if flag.supported:
        served = " or ".join(_spell(value) for value in flag.supported if value is not None)
        none_yet = flag.supported in ((None,), (False,))
        help += "; not supported yet" if none_yet else f"; only {served} so far"
    if flag.type is None:
        parser.add_argument(f"--{flag.name}", action="store_true", default=flag.default, help=help)
        parser.add_argument(
            f"--no_{flag.name}", dest=flag.name, action="store_false", help=argparse.SUPPRESS
        )
        return
    names = [f"--{name}" for name in (flag.name, *flag.aliases)]
    parser.add_argument(
        *names,
        dest=flag.name,
        type=flag.type,
        default=flag.default,
        choices=flag.choices,
        metavar=None if flag.choices else _METAVARS.get(flag.type, "TEXT"),
        help=help,
    )


def _normalize(arguments: Iterable[str], switches: frozenset[str]) -> list[str]:
    """Spell every flag with _ and a switch's value as its negation or nothing."""
    result = []
    for argument in arguments:
        if not argument.startswith("--"):
            result.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        if name in switches and equals:
            if value.lower() not in ("true", "false"):
                raise ConfigError(f"--{name}={value}: true or false is wanted")
            result.append(f"--{name}" if value.lower() == "true" else f"--no_{name}")
        else:
            result.append(f"--{name}{equals}{value}")
    return result


def parse(
    groups: Sequence[Group],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str,
    usage: str = "--model MODEL [FLAGS]",
) -> argparse.Namespace:
    """Parse a command line against some groups of the table; `--help` prints them and exits.

    Raises:
        ConfigError: an unknown flag, a value of the wrong type or out of range, or one whose
            feature is not there yet; the message names the flag.
    """
    parser = _Parser(
        prog=prog,
        usage=f"{prog} {usage}",
        description=description,
        epilog="Names may be written with - or _. A switch is --flag, --no_flag or "
        "--flag=true|false.",
        allow_abbrev=False,
    )
    for group in groups:
        section = parser.add_argument_group(group.title)
        for flag in group.flags:
            _add(section, flag)
    flags = [flag for group in groups for flag in group.flags]
    switches = frozenset(flag.name for flag in flags if flag.type is None)
    values = parser.parse_args(_normalize(arguments, switches))
    for flag in flags:
        value = getattr(values, flag.name)
        if flag.supported and value not in flag.supported:
            served = ", ".join(_spell(v) for v in flag.supported)
            raise ConfigError(
                f"--{flag.name}={_spell(value)} is not supported yet (supported: {served})"
            )
    return values


def spell(values: argparse.Namespace, groups: Iterable[Group]) -> list[str]:
    """The command line that gives `values` again, without what is at its default."""
    result = []
    for flag in (flag for group in groups for flag in group.flags):
        value = getattr(values, flag.name)
        if value == flag.default:
            continue
        if flag.type is None:
            result.append(f"--{flag.name}" if value else f"--no_{flag.name}")
        else:
            result.append(f"--{flag.name}={_spell(value)}")
    return result


def _spell(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(str(part) for part in value)
    return str(value)
