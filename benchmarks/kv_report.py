"""What benchmarks.kvtransfer has measured, beside the limits, and whether it is enough."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.table import Table

from benchmarks.stats import median

BETWEEN_DEVICES = ("device", "at once", "in chunks", "jax")
"""What benchmarks.kv_device runs."""
WAYS = (
    "shm", "bare pair", "shm pulled", "bare pair pulled", "copies",
    "grpc", "bare grpc", "packed grpc", "raw socket", *BETWEEN_DEVICES,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """`least`: the share of the fastest of `limits` that a transport must reach.

    `floor` does the same work with nothing else around it. Where not even it reaches `least` of
    the limits, the transport must reach `least` of the floor instead.
    """

    limits: tuple[str, ...]
    least: float
    floor: str | None = None


TARGETS = {
    "shm": Target(("copies",), 0.8, floor="bare pair"),
    "shm pulled": Target(("copies",), 0.8, floor="bare pair pulled"),
    "grpc": Target(("bare grpc",), 0.85, floor="packed grpc"),
    "device": Target(("at once", "in chunks"), 0.9),
}


@dataclass(slots=True)
class Measured:
    """One size: each way's seconds, round by round."""

    mib: float
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def gib_s(self, way: str) -> float:
        return self.mib / 1024 / (median(self.seconds[way]) or 1)

    def share(self, way: str, limit: str) -> float:
        """Of the limit's speed, the median of the rounds'."""
        pairs = zip(self.seconds[limit], self.seconds[way], strict=True)
        return median(bound / own for bound, own in pairs) or 0.0

    def limit(self, transport: str) -> str:
        """The way that limits it."""
        return max(TARGETS[transport].limits, key=self.gib_s)

    def bound(self, transport: str) -> str:
        """The way beside which it must reach its target: the limit, or its floor."""
        target, limit = TARGETS[transport], self.limit(transport)
        if target.floor is not None and self.share(target.floor, limit) < target.least:
            return target.floor
        return limit

    def missed(self) -> list[str]:
        """A line for each target that is not reached."""
        lines = []
        for transport, target in TARGETS.items():
            bound = self.bound(transport)
            share = self.share(transport, bound)
            if share < target.least:
                lines.append(
                    f"{transport} at {self.mib:.0f} MiB: {share:.2f} of {bound}, "
                    f"target {target.least:.2f}"
                )
        return lines


def speed_table(results: list[Measured]) -> Table:
    """The speed of every way."""
    table = Table(title="KV transfers, GiB/s")
    table.add_column("MiB", justify="right")
    for way in WAYS:
        table.add_column(way, justify="right")
    for each in results:
        table.add_row(f"{each.mib:.0f}", *(f"{each.gib_s(way):.2f}" for way in WAYS))
    return table


def share_table(results: list[Measured]) -> Table:
    """Each transport's shares; a floor's own share of the limit says which one bounds it."""
    table = Table(title="Shares; * is what the target is held beside")
    table.add_column("MiB", justify="right")
    columns = [
        (transport, way, of)
        for transport, target in TARGETS.items()
        for way, of in _pairs(transport, target)
    ]
    for transport, way, of in columns:
        least = f" (≥ {TARGETS[transport].least})" if way == transport else ""
        table.add_column(f"{way} / {of or 'the faster by hand'}{least}", justify="right")
    for each in results:
        table.add_row(f"{each.mib:.0f}", *(_share(each, *column) for column in columns))
    return table


def _pairs(transport: str, target: Target) -> list[tuple[str, str | None]]:
    """What is shown beside what; None stands for the fastest limit of several."""
    limit = target.limits[0] if len(target.limits) == 1 else None
    pairs: list[tuple[str, str | None]] = [(transport, limit)]
    if target.floor is not None:
        pairs += [(transport, target.floor), (target.floor, limit)]
    return pairs


def _share(measured: Measured, transport: str, way: str, of: str | None) -> str:
    of = of or measured.limit(transport)
    mark = "*" if way == transport and of == measured.bound(transport) else ""
    return f"{measured.share(way, of):.2f}{mark}"
