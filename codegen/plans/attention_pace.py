"""What ``paced`` adds to the plan of an sm_90a attention kernel, and what it asks of a spec."""

from __future__ import annotations

from codegen.plan import Constant, Param, pointer, require
from codegen.spec import AttentionSpec

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
    comment = "how often a tile looks whether the other thread blocks have come closer"
    return [Constant("kPaceTries", PACE_TRIES, comment)] if spec.paced else []


def pace_params(spec: AttentionSpec) -> list[Param]:
    """Return the parameter of ``paced``."""
    doc = "tiles that thread blocks began, then thread blocks that have ended: 0 between launches"
    return [pointer("progress", "int", doc, writes=True)] if spec.paced else []


def pace_summary(spec: AttentionSpec) -> list[tuple[str, str]]:
    """Return what ``explain`` says of it."""
    return [("pace", "thread blocks that are ahead wait, so that all ask for keys near one another")] * spec.paced
