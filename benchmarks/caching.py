"""What prefix caching and scheduling are worth, part by part.

    python -m benchmarks.caching [--parts a] [--model demo] [--json FILE] [--check]

a   a chat of several turns by several users with one system prompt, with the cache and without
b   many prefixes on two prefill workers, by what they have cached and by load alone
c   short prompts beside a long one, with chunked prefill and without, on the paced fake model
d   the router's choice of workers in a large deployment

With --check, exit status 1 when a target is missed or a part cannot be measured.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.caching_chat import measure_chat
from benchmarks.caching_choice import measure_choice
from benchmarks.caching_part import Part
from benchmarks.caching_routing import measure_routing
from benchmarks.caching_short import measure_short
from benchmarks.logged_process import StartError
from benchmarks.openai_stream import ServerError
from benchmarks.report import print_line
from benchmarks.stats import host_info

PARTS: dict[str, Callable[[argparse.Namespace, Callable[[str], None]], Part]] = {
    "a": measure_chat,
    "b": measure_routing,
    "c": measure_short,
    "d": measure_choice,
}
"""By letter; each takes the command line and what prints its progress."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = _parse(argv)
    console, status = Console(), Console(stderr=True)
    parts: dict[str, Part] = {}
    try:
        for letter in args.parts:
            parts[letter] = PARTS[letter](args, lambda line: print_line(status, line))
            console.print(parts[letter].table())
    except (StartError, ServerError) as error:
        print_line(status, str(error), style="red")
        return 1
    console.print(_targets(parts))
    if args.json:
        measured = {letter: part.as_json() for letter, part in parts.items()}
        args.json.write_text(json.dumps({"host": host_info(), "parts": measured}, indent=2))
    missed = [f"{letter}: {line}" for letter, part in parts.items() for line in part.missed]
    for line in missed:
        print_line(status, f"missed: {line}", style="red")
    return 1 if args.check and missed else 0


def _targets(parts: Mapping[str, Part]) -> Table:
    """What is held against a target, of all parts."""
    table = Table("", "measured", "target", "", title="targets")
    for letter, part in parts.items():
        for name, value, target, kept in part.targets():
            shown = "" if value is None else f"{value:.3g}"
            table.add_row(f"{letter}: {name}", shown, target, "kept" if kept else "missed")
    return table


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.caching", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--parts", type=_letters, default=list(PARTS), help=f"of {', '.join(PARTS)}; default all"
    )
    parser.add_argument("--model", default="demo", help="for the parts that take times")
    parser.add_argument("--disagg_topo", help="of part a; default: colocated")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(argv)


def _letters(text: str) -> list[str]:
    letters = text.replace(",", "")
    unknown = sorted(set(letters) - set(PARTS))
    if unknown or not letters:
        raise argparse.ArgumentTypeError(f"{text!r}: the parts are {', '.join(PARTS)}")
    return list(dict.fromkeys(letters))


if __name__ == "__main__":
    sys.exit(main())
