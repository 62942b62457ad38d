"""Runs the checks of checks.py on four processes with gloo, and says of each what every rank made of it.

    python tests/distributed/ranks.py [NAME ...]

The processes are forked once everything is imported. Kernels are those of oracle_calls, by the definition.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import queue
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2]), str(Path(__file__).parent)]
import checks  # noqa: E402
import oracle_calls  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

RANKS = 4
SECONDS = 30  # a check takes a second or two; what hangs is told with its lines


def on_rank(rank: int, folder: str, names: list[str], answers: Any) -> None:
    """Run the checks on one rank, as many of them as all ranks pass."""
    torch.set_num_threads(1)
    faulthandler.enable()
    oracle_calls.install()
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=dist.FileStore(f"{folder}/store", RANKS))
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    for name in names:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            checks.CHECKS[name](checks.Here(dist.group.WORLD, pair))
        except BaseException:
            answers.put((rank, name, traceback.format_exc()))
        else:
            answers.put((rank, name, ""))
    answers.put((rank, "", ""))
    dist.barrier()


def main(names: list[str]) -> dict[str, list[str]]:
    """Return, by check, what each rank has to say; nothing where it passed."""
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=on_rank, args=(r, folder, names, answers)) for r in range(RANKS)]
        for process in processes:
            process.start()
        found: dict[str, list[str]] = {name: ["no answer"] * RANKS for name in names}
        done = 0
        try:
            while done < RANKS:
                rank, name, text = answers.get(timeout=SECONDS + 10)
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
    json.dump(main(sys.argv[1:] or list(checks.CHECKS)), sys.stdout)
