"""Runs a module-level function in several gloo processes, quickly: imports happen once, in a fork server."""

import faulthandler
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.warm"])


def run_ranks(function: Callable[..., Any], world_size: int, tmp_path: Path, *args: Any, timeout: float = 300) -> list:
    """Return what `function(*args)` returned on each rank; its strategy finds the ranks in the environment.

    A rank that fails fails the test with its traceback; a rank that hangs has every thread's stack dumped.
    """
    number = len(list(tmp_path.glob("ranks-*")))
    folder = tmp_path / f"ranks-{number}"
    folder.mkdir(parents=True)
    workers = [
        _context.Process(
            target=_work, args=(function, rank, world_size, folder, timeout, dict(os.environ), args), daemon=True
        )
        for rank in range(world_size)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout)
    hung = [rank for rank, worker in enumerate(workers) if worker.is_alive()]
    for worker in workers:
        worker.kill()
    problems = "\n".join(p.read_text() for p in sorted(folder.glob("*.log")) if p.stat().st_size)
    assert not hung, f"ranks {hung} hang after {timeout} s:\n{problems}"
    results = [folder / f"{rank}.pt" for rank in range(world_size)]
    assert all(r.exists() for r in results), f"a rank failed:\n{problems}"
    return [torch.load(r, weights_only=False) for r in results]


def _work(
    function: Callable[..., Any], rank: int, world_size: int, folder: Path, timeout: float, environ: dict, args: tuple
) -> None:
    log = (folder / f"{rank}.log").open("w")
    sys.stdout = sys.stderr = log
    faulthandler.dump_traceback_later(timeout - 2, file=log)
    torch.set_num_threads(1)
    # The fork server has the environment of its own start; a test may have changed its own since.
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size),
        DS_ACCELERATOR="cpu", TORCHDYNAMO_DISABLE="1",
    )  # fmt: skip
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
    code = 1
    try:
        result = function(*args)
        if torch.distributed.is_initialized():  # a command that uploads leaves the group itself
            torch.distributed.barrier()
        log.truncate(0)
        torch.save(result, folder / f"{rank}.part")
        (folder / f"{rank}.part").rename(folder / f"{rank}.pt")
        code = 0
    except BaseException:
        traceback.print_exc(file=log)
    log.flush()
    os._exit(code)
