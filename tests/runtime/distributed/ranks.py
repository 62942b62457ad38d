"""Runs checks on several processes, and says of each what every rank made of it.

    python tests/runtime/distributed/ranks.py checks 4 [NAME ...]      # gloo; kernels of oracle_calls
    python tests/runtime/distributed/ranks.py gpu_checks 2 [NAME ...]  # NCCL; a GPU for each rank

The processes are forked once everything is imported.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(PROJECT / "tests" / "support"), str(PROJECT), str(Path(__file__).parent)]
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

SECONDS = {"gloo": 150, "nccl": 400}
"""Of a check: what hangs is ended, and told with its lines."""


def on_rank(rank: int, folder: str, names: list[str], module: Any, ranks: int, answers: Any) -> None:
    """Run the checks on one rank."""
    torch.set_num_threads(1)
    faulthandler.enable()
    device = torch.device("cpu")
    if module.BACKEND == "nccl":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    options = {"device_id": device} if module.BACKEND == "nccl" else {}
    dist.init_process_group(module.BACKEND, rank=rank, world_size=ranks, store=store, **options)
    here = module.here()
    for name in names:
        faulthandler.dump_traceback_later(SECONDS[module.BACKEND], exit=True)
        try:
            module.CHECKS[name](here)
        except BaseException:
            answers.put((rank, name, traceback.format_exc()))
        else:
            answers.put((rank, name, ""))
    answers.put((rank, "", ""))
    dist.barrier()
    faulthandler.cancel_dump_traceback_later()


def main(name: str, ranks: int, names: list[str]) -> dict[str, list[str]]:
    """Return, by check, what each rank has to say; nothing where it passed."""
    module = importlib.import_module(name)
    names = names or list(module.CHECKS)
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = folder, names, module, ranks, answers
        processes = [context.Process(target=on_rank, args=(rank, *given)) for rank in range(ranks)]
        for process in processes:
            process.start()
        found: dict[str, list[str]] = {name: ["no answer"] * ranks for name in names}
        done = 0
        try:
            while done < ranks:
                rank, name, text = answers.get(timeout=SECONDS[module.BACKEND] + 10)
                done += not name
                if name:
                    found[name][rank] = text
        except queue.Empty:  # ranks wait for one that has failed, and have been ended
            pass
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    return found


if __name__ == "__main__":
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    json.dump(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]), sys.stdout)
