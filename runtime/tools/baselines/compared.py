"""Changes since a baseline that exceed the noise of both runs and are not explained by the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.tools.baselines.stored import WAYS, Row, Timings
from runtime.tools.bench.noise import Change, Interval, change, interval

Verdict = Literal["faster", "slower", "noise", "machine"]


@dataclass(frozen=True)
class Compared:
    """A kernel's timing in one mode, now and in the baseline.

    Attributes:
        way: single calls, or back to back.
        now: the interval of this run.
        before: the interval of the baseline.
        verdict: ``noise`` if the intervals overlap; ``machine`` if they do not, but a peer has changed in the same
            direction and the ratio to it is within noise; otherwise ``faster`` or ``slower``.
        peers: peers that have changed beyond noise.
    """

    way: str
    now: Interval
    before: Interval
    verdict: Verdict
    peers: dict[str, Change]

    @property
    def ratio(self) -> float:
        """Speedup over the baseline."""
        return self.before.middle / self.now.middle


def times(timings: Timings, way: str) -> Interval:
    """The interval of a call's repeats in one mode."""
    return interval(getattr(timings, way))


def compare(now: Row, before: Row) -> list[Compared]:
    """Compare a row with the baseline's row, in both modes."""
    return [_compared(now, before, way) for way in WAYS]


def _compared(now: Row, before: Row, way: str) -> Compared:
    own, earlier = times(now.own, way), times(before.own, way)
    found: Verdict = change(own, earlier)
    moved: dict[str, Change] = {}
    for name in now.peers.keys() & before.peers.keys():
        peer, peer_before = times(now.peers[name], way), times(before.peers[name], way)
        peer_change = change(peer, peer_before)
        if peer_change != "noise":
            moved[name] = peer_change
        if peer_change == found != "noise" and change(_over(own, peer), _over(earlier, peer_before)) != found:
            found = "machine"
    return Compared(way, own, earlier, found, dict(sorted(moved.items())))


def _over(one: Interval, other: Interval) -> Interval:
    """The interval of a ratio."""
    return Interval(one.low / other.high, one.middle / other.middle, one.high / other.low)
