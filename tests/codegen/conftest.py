"""What the tests of the pure side share."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from codegen.cases import case_names, most_allowed
from codegen.library import NamedSpec, find_spec
from codegen.planning import plan_for
from codegen.receipts import Receipt

settings.register_profile("codegen", deadline=None)  # a busy machine is not a failure
settings.load_profile("codegen")

ATTENTION = {
    "op": "attention",
    "arch": "sm_90a",
    "dtype": "fp16",
    "head_dim": 128,
    "pattern": {"kind": "topk", "k": 32, "block": {"q": 128, "kv": 128}},
    "tile": {"m": 128, "n": 128},
    "mma": "wgmma",
    "copy": "tma",
    "schedule": "ping_pong",
    "stages": 2,
    "lse": True,
    "stream_k_tail": True,
}
SPMM = {
    "op": "bsr_spmm",
    "arch": "sm_90a",
    "dtype": "fp16",
    "block": {"rows": 128, "cols": 128},
    "tile": {"m": 128, "n": 256, "k": 64},
    "mma": "wgmma",
    "copy": "tma",
    "schedule": "cooperative",
    "stages": 3,
}
SDDMM = {**SPMM, "op": "bsr_sddmm", "stages": 4}
SPGEMM = {**SPMM, "op": "bsr_spgemm", "tile": {"m": 128, "n": 128, "k": 64}}


@pytest.fixture
def attention() -> dict[str, Any]:
    """Every field of an attention spec, the test's own copy."""
    return copy.deepcopy(ATTENTION)


@pytest.fixture
def spmm() -> dict[str, Any]:
    """Every field of a BSR x dense spec, the test's own copy."""
    return copy.deepcopy(SPMM)


@pytest.fixture
def sddmm() -> dict[str, Any]:
    """Every field of a sampled product's spec, the test's own copy."""
    return copy.deepcopy(SDDMM)


@pytest.fixture
def spgemm() -> dict[str, Any]:
    """Every field of a BSR x BSR spec, the test's own copy."""
    return copy.deepcopy(SPGEMM)


@pytest.fixture
def write_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a spec file into the current folder and returns its relative path."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "kernel.yaml") -> Path:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return Path(name)

    return write


@pytest.fixture
def named() -> NamedSpec:
    """A shipped spec."""
    return find_spec("h100_topk32")


@pytest.fixture
def receipt() -> Callable[[NamedSpec, str], Receipt]:
    """Makes a receipt of a source whose cases all passed."""

    def make(named: NamedSpec, source: str) -> Receipt:
        plan = plan_for(named)
        largest = min(0.0005, most_allowed(plan))
        return Receipt.model_validate_json(
            Receipt.model_validate(
                {
                    "spec": {"file": named.origin, "hash": named.spec.hash},
                    "source": {
                        "file": named.source_file,
                        "sha256": hashlib.sha256(source.encode()).hexdigest(),
                    },
                    "cubin": {
                        "sha256": "0" * 64,
                        "arch": named.spec.arch,
                        "compiler": "NVRTC 13.0",
                        "compiler_package": "nvidia-cuda-nvrtc 13.0.88",
                        "options": (f"--gpu-architecture={named.spec.arch}",),
                        "registers": 168,
                        "spill_bytes": 0,
                        "stack_bytes": 0,
                        "static_shared_bytes": 0,
                        "dynamic_shared_bytes": plan.shared_bytes,
                        "instructions": {"UTMALDG": 8, "HGMMA": 32},
                    },
                    "verification": {
                        "device": "a device",
                        "driver": "580.0",
                        "target": f"{named.spec.arch} cubin",
                        "oracle": "float64",
                        "torch": "2.11.0",
                        "worst_error": largest,
                        "cases": tuple(
                            {
                                "name": name,
                                "description": "one tile",
                                "max_error": largest,
                                "torch_error": 0.0004,
                                "tolerance": most_allowed(plan),
                                "passed": True,
                            }
                            for name in case_names(plan)
                        ),
                    },
                    "measurement": (
                        {
                            "shape": "1 x 16 x 8192 x 128",
                            "milliseconds": 1.0,
                            "tflops": 2.0,
                            "peer": "SDPA",
                            "peer_milliseconds": 3.0,
                            "peer_tflops": 4.0,
                        },
                    ),
                }
            ).model_dump_json()
        )

    return make
