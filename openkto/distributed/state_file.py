"""state.json of a checkpoint: the state of its run, checked when it is read."""

import re
from pathlib import Path
from typing import Any

from openkto.distributed.checkpoint_folder import NAME, step_of
from openkto.distributed.manifest import NOT_OURS, STATE, read_json
from openkto.errors import CheckpointError

# What a run cannot be resumed without.
NEEDED = ("run", "updates", "identity", "reporter", "total_steps", "settings")
# The records that a run appends to, under --save_path. Their sizes stand in earlier checkpoints, and a resume cuts
# them: any other name would be somebody's own file.
RECORDS = ("metrics.jsonl", "batches.jsonl")
# It becomes part of file names.
RUN_ID = re.compile(r"[0-9a-f]{8}")


def read_state(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint says of its run.

    Raises:
        CheckpointError: it is not a state that OpenKTO wrote.
    """
    try:
        state = read_json(folder / STATE)
        problem = _problem_with(state, folder.resolve().name)
    except (OSError, *NOT_OURS) as error:
        raise CheckpointError(f"{STATE} cannot be read ({error})") from None
    if problem is not None:
        raise CheckpointError(f"{STATE} {problem}")
    assert isinstance(state, dict)
    return state


def _problem_with(state: dict[str, Any], folder_name: str) -> str | None:
    lacking = [name for name in NEEDED if name not in state]
    if lacking:
        return f"lacks {lacking[0]}"
    if any(not isinstance(state[name], dict) for name in ("run", "identity", "reporter", "settings")):
        return "holds something else than a run's state"
    run, sizes = state["run"], state["reporter"].get("sizes", {})
    numbers = [run["step"], run["updates"], run["consumed_samples"], state["updates"], state["total_steps"]]
    numbers.append(max(0, run["best_step"]))  # negative where there is none
    numbers.append(run.get("evaluations_since_best", 0))  # earlier versions did not count them
    if any(type(number) is not int or number < 0 for number in [*numbers, *sizes.values()]):
        return "has no count where one must be"
    if RUN_ID.fullmatch(run["run_id"]) is None:
        return f"names the run {run['run_id'][:60]!r}, which is no run's name"
    strange = [name for name in sizes if name not in RECORDS]
    if strange:
        return f"names {strange[0][:60]!r}, which is no record of a run"
    if NAME.fullmatch(folder_name) and run["step"] != step_of(folder_name):
        return f"is of step {run['step']}"
    return None
