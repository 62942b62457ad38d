"""The launch hash of version 1 receipts, which covers names: used only to check whether such a receipt still holds."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from codegen.plan import Plan


def launch(plan: Plan) -> dict[str, Any]:
    """Fields of version 1's launch hash."""
    prologue = plan.prologue
    further = {"prologue_shared_bytes": prologue.shared_bytes, "prologue_overlaps": 1} if prologue else {}
    return {
        "threads": plan.threads,
        "dynamic_shared_bytes": plan.shared_bytes,
        "cluster": plan.cluster,
        "params": [[param.name, param.type] for param in plan.params],
        "tensor_maps": {name: [list(found.box), found.swizzle] for name, found in plan.tensor_maps.items()},
        "prologue_threads": prologue.threads if prologue else 0,
        **(further if prologue and prologue.overlaps else {}),
    }


def launch_sha256(plan: Plan) -> str:
    """Hash of the launch in version 1 receipts."""
    return hashlib.sha256(_json(plan)).hexdigest()


def code_sha256(code: bytes, plan: Plan) -> str:
    """Hash of code and launch together in older rows of benchmarks."""
    return hashlib.sha256(code + _json(plan)).hexdigest()


def _json(plan: Plan) -> bytes:
    return json.dumps(launch(plan), sort_keys=True).encode()
