"""Script for a profiler: launches a kernel's reference workload several times. No module imports it."""

from __future__ import annotations

import json
import sys
import time

AT_ONCE_SECONDS = 0.05  # seconds of calls per synchronization


def main(spec: str, launches: int, seconds: float = 0.0) -> None:
    """Launch a kernel on its reference workload, and print the workload as JSON.

    With ``seconds``, launch it back to back for that long afterwards, after printing a JSON line that names the GPU.
    """
    import torch  # noqa: PLC0415

    from runtime.compile import prebuilt  # noqa: PLC0415
    from runtime.kernel import load_kernel  # noqa: PLC0415
    from runtime.tools.bench.measurement import workload_of  # noqa: PLC0415

    with prebuilt.ignored():
        kernel = load_kernel(spec, forward_compatible=True)
    with torch.no_grad():
        load = workload_of(kernel.spec)(kernel)
        for _ in range(launches):
            load.call()
        torch.cuda.synchronize()
        if seconds:
            _tell({"gpu": f"GPU-{torch.cuda.get_device_properties(0).uuid}"})
            began = time.perf_counter()
            load.call()
            torch.cuda.synchronize()
            many = max(1, int(AT_ONCE_SECONDS / (time.perf_counter() - began)))
            while time.perf_counter() - began < seconds:
                for _ in range(many):
                    load.call()
                torch.cuda.synchronize()
    _tell({"shape": load.shape, "flops": load.flops, "device": torch.cuda.get_device_name()})


def _tell(fields: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:]))
