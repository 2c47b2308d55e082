"""What a checkpoint costs beside DeepSpeed's own: bytes on the disk, and seconds that training waits.

    python -m benchmarks.checkpoints

A tiny Llama and one of 31M parameters in float32, 2 gloo ranks, ZeRO 1, 2 and 3, medians over saves in turns.
DeepSpeed's `engine.save_checkpoint` leaves its bytes to the system's cache; ours hashes them, puts them on the disk
past all caches and adds what a run needs to go on exactly. The table is printed last.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from shutil import rmtree

import torch
import transformers

from openkto.distributed.checkpoint import Checkpoints
from openkto.distributed.checkpoint_folder import folder_bytes
from openkto.distributed.strategy import DeepspeedStrategy
from openkto.models import Actor
from openkto.trainer.rng import rng_state

REPEATS, RANKS, STAGES = 5, 2, (1, 2, 3)
SIZES = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "31M": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 7},
}


def main() -> None:
    """Measure all and print the table."""
    lines = ["model  ZeRO  bytes: DeepSpeed  ours  ratio  seconds: DeepSpeed  ours"]
    for size in SIZES:
        for stage in STAGES:
            with tempfile.TemporaryDirectory() as folder:
                theirs, ours, their_seconds, our_seconds = measure(size, stage, Path(folder))
            ratio = ours / theirs
            lines.append(
                f"{size:>5}  {stage:>4}  {theirs:>16}  {ours}  {ratio:.3f}  {their_seconds:>18.3f}  {our_seconds:.3f}"
            )
    print("\n".join(lines))


def measure(size: str, stage: int, folder: Path) -> tuple[int, int, float, float]:
    """Return the bytes and the median seconds of DeepSpeed's own checkpoint and of ours."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [context.Process(target=run_rank, args=(rank, size, stage, folder, results)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
    return results.get()


def run_rank(rank: int, size: str, stage: int, folder: Path, results: multiprocessing.SimpleQueue) -> None:
    """Train one step, then save in turns."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_SIZE=str(RANKS))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    strategy = DeepspeedStrategy(zero_stage=stage, param_dtype="fp32")
    strategy.setup_distributed()
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**SIZES[size], **heads)
    actor = Actor(transformers.LlamaForCausalLM(config))
    optimizer = strategy.create_optimizer(actor, lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    (engine, _, _), _ = strategy.prepare((actor, optimizer, scheduler))
    ids_BT = torch.randint(0, 512, (2, 16))
    scored_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    scored_BT[:, 0] = False
    strategy.backward(
        engine, -engine(ids_BT, torch.ones_like(ids_BT), scored_BT).log_prob_B.mean().float(), is_last=True
    )
    strategy.step(engine)

    checkpoints = Checkpoints(folder / "ours", strategy, max_number=1)
    checkpoints.make_folder()
    states = strategy.gather_objects(rng_state(strategy.device))
    arrays = {f"rng/{r}/{name}": array for r, state in enumerate(states) for name, array in state.items()}
    own_writer = engine.checkpoint_engine
    seconds: tuple[list[float], list[float]] = ([], [])
    theirs = 0
    for repeat in range(1, REPEATS + 1):
        engine.checkpoint_engine = own_writer
        strategy.barrier()
        started = time.perf_counter()
        engine.save_checkpoint(str(folder / "theirs"), tag="global_step1")
        seconds[0].append(time.perf_counter() - started)
        theirs = folder_bytes(folder / "theirs" / "global_step1")
        strategy.barrier()
        if rank == 0:
            rmtree(folder / "theirs")
        strategy.barrier()
        started = time.perf_counter()
        assert checkpoints.save(engine, repeat, {"updates": 1}, arrays)
        seconds[1].append(time.perf_counter() - started)
    if rank == 0:
        ours = folder_bytes(folder / "ours" / f"global_step{REPEATS}")
        results.put((theirs, ours, *(statistics.median(values) for values in seconds)))
    strategy.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
