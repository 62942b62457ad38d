"""What ``paced`` adds to the plan of an sm_90a attention kernel, and what it asks of a spec."""

from __future__ import annotations

from codegen.plan import Constant, Param, pointer, require
from codegen.spec import AttentionSpec

PACE_SHARE = 8  # a quarter of a tile is up to 3% slower on an H100, a sixteenth 0.5% on an H200
PACE_TRIES = 32  # keeps a thread block from waiting for long for others that are not there


def check_pace(spec: AttentionSpec, streams: int) -> None:
    """Refuse a spec whose tiles have several producers, which would each mark them.

    Raises:
        SpecError: names ``paced``.
    """
    given = f"is true; with {streams} lists, or parts of one, in a tile there are kernels with it only with share_kv"
    require(not spec.paced or spec.share_kv or streams == 1, "paced", given)


def pace_constants(spec: AttentionSpec) -> list[Constant]:
    """Return the constants of ``paced``."""
    if not spec.paced:
        return []
    return [
        Constant("kPaceShare", PACE_SHARE, "a thread block may be a tile / kPaceShare ahead of the average"),
        Constant("kPaceTries", PACE_TRIES, "how often a tile looks whether the other thread blocks have come closer"),
    ]


def pace_params(spec: AttentionSpec) -> list[Param]:
    """Return the parameter of ``paced``."""
    doc = "tiles that thread blocks began, then thread blocks that have ended: 0 between launches"
    return [pointer("progress", "int", doc, writes=True)] if spec.paced else []


def pace_summary(spec: AttentionSpec) -> list[tuple[str, str]]:
    """Return what ``explain`` says of it."""
    return [("pace", "thread blocks that are ahead wait, so that all ask for keys near one another")] * spec.paced
