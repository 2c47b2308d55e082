"""Does one of DeepSpeed's other checkpoint engines hold up training for less time than plain `torch.save`?

    python -m benchmarks.checkpoint_engines

A random Llama of 31M parameters in float32 on 2 gloo ranks at ZeRO 1, 2 and 3. Per engine, medians over saves that take
turns: how long `engine.save_checkpoint` holds up training, how long the next step waits for a decoupled writer, and
their sum as a ratio to torch's default; whether the files can be read back, and what happens when writing fails (files
limited to 8 MiB stand for a full disk). Then what hashing and fsync cost while writing one file. Nothing here syncs to
the disk unless it says so: the system's cache takes the bytes.
"""

import hashlib
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any, BinaryIO

import torch
import transformers
from deepspeed.datastates.config import DeepSpeedDataStatesConfig
from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config
from torch.utils._pytree import tree_map

from openkto.distributed.strategy import DeepspeedStrategy
from openkto.models import Actor

STAGES, REPEATS, RANKS = (1, 2, 3), 5, 2
LIMIT = 8 * 2**20
FIRST = "torch, zip (the default)"
PLAIN = "torch.save to a path"
ENGINES: dict[str, dict[str, Any]] = {
    FIRST: {},
    "torch, zip without crc32": {},
    "torch, no zip": {"checkpoint_serialization": False},
    "fast, defaults": {"writer": {}},
    "fast, aio": {"writer": {"data_parallel": "machine"}},
    "fast, python": {"writer": {"type": "python", "data_parallel": "machine"}},
    "decoupled, python": {"writer": {"type": "python", "data_parallel": "machine", "decoupled": True}},
    "decoupled, detached by us": {"writer": {"type": "python", "data_parallel": "machine", "decoupled": True}},
    "datastates": {"datastates": True},
}
Step = Callable[[], float]


def main() -> None:
    """Run all and print the tables."""
    with tempfile.TemporaryDirectory() as scratch:
        found = {stage: run_ranks(stage, Path(scratch)) for stage in STAGES}
        writes = write_times(Path(scratch))
    print(f"\nZeRO  {'engine':26} {'step, s':>8} {'save, s':>8} {'wait, s':>8} {'held up':>8}  read back")
    for stage in STAGES:
        held_up = {name: row["save"] + row["wait"] for name, row in found[stage].items() if "save" in row}
        for name, row in found[stage].items():
            if name in held_up:
                times = f"{row['step']:8.2f} {row['save']:8.2f} {row['wait']:8.2f}"
                print(f"{stage:4}  {name:26} {times} {held_up[name] / held_up[FIRST]:7.2f}x  {row['read']}")
            else:
                print(f"{stage:4}  {name:26} {row['error']}")
    print("\nWhen writing fails, at ZeRO 2, on rank 0:")
    for name, row in found[2].items():
        if "failure" in row:
            print(f"  {name}")
            for line in row["failure"]:
                print(f"      {line}")
    print(f"\n{'one file of 360 MB':44} {'s':>6} {'ratio':>6}")
    for name, seconds in writes.items():
        print(f"{name:44} {seconds:6.2f} {seconds / writes[PLAIN]:6.2f}")
    print()
    for name, speed in hash_speeds().items():
        print(f"{name:10} {speed:6.2f} GB/s")


def run_ranks(stage: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Run all engines at one stage in processes of their own; return rank 0's rows by engine."""
    own = folder / f"zero{stage}"
    own.mkdir()
    command = [sys.executable, "-m", "benchmarks.checkpoint_engines", str(stage), str(own)]
    # The last two are set by the deepspeed launcher alone; without them every engine with a writer is a KeyError.
    shared = {"WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS), "CROSS_SIZE": "1", "CROSS_RANK": "0"}
    workers = []
    for rank in range(RANKS):
        environ = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (own / f"{rank}.log").open("w") as log:
            workers.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
    for worker in workers:
        worker.wait(timeout=1200)
    result = own / "rows.json"
    if not result.exists():
        sys.exit("\n".join(log.read_text() for log in sorted(own.glob("*.log"))))
    return json.loads(result.read_text())


def work(stage: int, folder: Path) -> None:
    """One rank: take turns with the engines, then see each of them fail."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    engine, step = make_engine(stage)
    rows: dict[str, dict[str, Any]] = {name: {} for name in ENGINES}
    checkpoint_engines = {}
    for name, settings in ENGINES.items():
        try:
            one = make_checkpoint_engine(engine, settings)
            if "detached" in name:
                detach_first(one)
            # Also the warm-up.
            take(engine, one, name)
            engine.save_checkpoint(str(folder / name), "a")
            step()
            rows[name]["read"] = outcome(lambda name=name: engine.load_checkpoint(str(folder / name), "a"))
            checkpoint_engines[name] = one
        except Exception as error:
            rows[name]["error"] = said(error)
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in checkpoint_engines}
    waits: list[float] = []
    commit = engine._commit_decoupled_checkpoint
    engine._commit_decoupled_checkpoint = lambda: waits.append(seconds(commit))  # called in each step
    for turn in range(REPEATS):
        for name in checkpoint_engines:
            take(engine, checkpoint_engines[name], name)
            target = folder / f"{name} {turn}"
            waits[:] = [0.0]
            save = seconds(lambda target=target: engine.save_checkpoint(str(target), "a"))
            took = step()
            times[name].append((save, waits[-1], took - waits[-1]))
            if rank == 0:
                rmtree(target)
                os.sync()
    for name, found in times.items():
        medians = (statistics.median(column) for column in zip(*found, strict=True))
        rows[name] |= zip(("save", "wait", "step"), medians, strict=True)
    if stage == 2:
        for name in checkpoint_engines:
            take(engine, checkpoint_engines[name], name)
            rows[name]["failure"] = failure(engine, step, folder / f"{name} failure")
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    torch.distributed.barrier()
    end(0)


def end(status: int) -> None:
    """End this process and the writers' processes, which outlive it otherwise."""
    for process in multiprocessing.active_children():
        process.kill()
    sys.stderr.flush()
    os._exit(status)


def make_engine(stage: int) -> tuple[Any, Step]:
    """Return the engine and a function that makes one training step and returns its seconds."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=7, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=128,
    )  # fmt: skip
    strategy = DeepspeedStrategy(zero_stage=stage, param_dtype="fp32")
    strategy.setup_distributed()
    actor = Actor(transformers.LlamaForCausalLM(config))
    optimizer = strategy.create_optimizer(actor, lr=1e-6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    (engine, *_), _ = strategy.prepare((actor, optimizer, scheduler))
    ids = torch.randint(0, 8192, (2, 64))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False

    def step() -> None:
        loss = -engine(ids, torch.ones_like(ids), mask).log_prob_B.mean()
        strategy.backward(engine, loss, is_last=True)
        strategy.step(engine)

    return engine, lambda: seconds(step)


def make_checkpoint_engine(engine: Any, settings: dict[str, Any]) -> Any:
    """Have DeepSpeed make the checkpoint engine of these settings; a decoupled one starts its process."""
    engine._config.checkpoint_config = get_checkpoint_config({"checkpoint": settings})
    engine._config.datastates_config = DeepSpeedDataStatesConfig(
        {"datastates_ckpt": {}} if "datastates" in settings else {}
    )
    engine._configure_checkpointing()
    return engine.checkpoint_engine


def take(engine: Any, checkpoint_engine: Any, name: str) -> None:
    """Have the engine save with this one, as if it had been configured with it alone."""
    engine.checkpoint_engine = checkpoint_engine
    torch.serialization.set_crc32_options("without crc32" not in name)
    is_writer = checkpoint_engine.is_data_parallel_writer(torch.distributed.get_rank())
    engine.save_non_zero_checkpoint = is_writer or engine.zero_optimization_partition_weights()


def detach_first(checkpoint_engine: Any) -> None:
    """Have tensors detached before they go to the writer's process."""
    usual = checkpoint_engine.save

    def save(state_dict: Any, path: str) -> None:
        usual(tree_map(lambda item: item.detach() if isinstance(item, torch.Tensor) else item, state_dict), path)

    checkpoint_engine.save = save


def failure(engine: Any, step: Step, folder: Path) -> list[str]:
    """Return what a save that cannot be written, the step after it and the next good save and step did."""
    process = getattr(engine.checkpoint_engine, "ckpt_process", None)
    pid = process.pid if process else os.getpid()
    usual = resource.prlimit(pid, resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
    lines = [
        f"the save: {outcome(lambda: engine.save_checkpoint(str(folder), 'a'))}",
        f"the next step: {outcome(step)}",
    ]
    if process is None or process.is_alive():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, usual)
    lines += [
        f"with room again, a save: {outcome(lambda: engine.save_checkpoint(str(folder), 'b'))}",
        f"the next step: {outcome(step)}",
    ]
    sizes = {file.name: file.stat().st_size // 2**20 for file in sorted((folder / "b").glob("*.pt"))}
    return [*lines, f"files of it, MiB: {sizes}"]


def outcome(action: Callable[[], Any]) -> str:
    """Run it on all ranks; return "yes" or the error, with its seconds where they are many."""
    started = time.perf_counter()
    try:
        action()
        text = "yes"
    except Exception as error:
        text = said(error)
    took = time.perf_counter() - started
    return f"{text} (after {took:.0f} s)" if took > 8 else text


def said(error: Exception) -> str:
    """Return the error's kind and the start of its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:70]}"


def seconds(action: Callable[[], Any]) -> float:
    """Return how long it takes on all ranks together."""
    torch.distributed.barrier()
    started = time.perf_counter()
    action()
    torch.distributed.barrier()
    return time.perf_counter() - started


# ---- one file: hashing and fsync ------------------------------------------------------------------------------------


class HashingFile:
    """A file for `torch.save` that shows each piece to `update` on its way."""

    def __init__(self, file: BinaryIO, update: Callable[[bytes], Any]) -> None:
        self.file, self.update = file, update

    def write(self, data: bytes) -> int:
        """Write and hash."""
        self.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        """Flush the file."""
        self.file.flush()


def write_times(folder: Path) -> dict[str, float]:
    """Return the median seconds of each way to write one file, taking turns."""
    state = {f"tensor {n}": torch.randn(1_000_000) for n in range(90)}

    def to_path(path: Path, *, zips: bool = True, crc: bool = True) -> None:
        torch.serialization.set_crc32_options(crc)
        torch.save(state, path, _use_new_zipfile_serialization=zips)
        torch.serialization.set_crc32_options(True)

    def through(path: Path, update: Callable[[bytes], Any], *, syncs: bool = True) -> None:
        with path.open("wb") as file:
            torch.save(state, HashingFile(file, update))
            if syncs:
                file.flush()
                os.fsync(file.fileno())

    ways: dict[str, Callable[[Path], Any]] = {
        PLAIN: to_path,
        "to a path, zip without its crc32": lambda path: to_path(path, crc=False),
        "to a path, no zip": lambda path: to_path(path, zips=False),
        "to a path, fsync": lambda path: (to_path(path), sync(path)),
        "to a path, read for sha256, fsync": lambda path: (to_path(path), read(path), sync(path)),
        "through a Python file": lambda path: through(path, len, syncs=False),
        "through a Python file, fsync": lambda path: through(path, len),
        "hashing by sha256, fsync": lambda path: through(path, hashlib.sha256().update),
        "hashing by crc32, fsync": lambda path: through(path, zlib.crc32),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way(folder / "file.pt")
            times[name].append(time.perf_counter() - started)
            (folder / "file.pt").unlink()
            os.sync()
    return {name: statistics.median(column[1:]) for name, column in times.items()}


def read(path: Path) -> str:
    """Return a file's hash."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """See a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def hash_speeds() -> dict[str, float]:
    """Return GB/s of each hash over 256 MB."""
    data = os.urandom(2**28)
    kinds = {"sha256": hashlib.sha256, "blake2b": hashlib.blake2b, "crc32": zlib.crc32}
    speeds = {}
    for name, kind in kinds.items():
        started = time.perf_counter()
        kind(data)
        speeds[name] = len(data) / 1e9 / (time.perf_counter() - started)
    return speeds


if __name__ == "__main__":
    if len(sys.argv) > 1:
        try:
            work(int(sys.argv[1]), Path(sys.argv[2]))
        except BaseException:
            traceback.print_exc()
            end(1)
    else:
        main()
