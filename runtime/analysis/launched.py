"""What a profiler starts: a kernel's reference workload, launched some times. Not imported by anything."""

from __future__ import annotations

import json
import sys


def main(spec: str, launches: int) -> None:
    """Launch a kernel on its reference workload, and print what that is as JSON."""
    import torch  # noqa: PLC0415

    from runtime.bench.measurement import WORKLOADS  # noqa: PLC0415
    from runtime.kernel import load_kernel  # noqa: PLC0415

    kernel = load_kernel(spec, forward_compatible=True)
    with torch.no_grad():
        load = WORKLOADS[kernel.spec.op](kernel)
        for _ in range(launches):
            load.call()
        torch.cuda.synchronize()
    sys.stdout.write(json.dumps({"shape": load.shape, "flops": load.flops, "device": torch.cuda.get_device_name()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
