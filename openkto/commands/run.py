"""Runs a command: one sentence and an exit status for what goes wrong, and a clean end of the process.

Exit status: 0 done; 2 the command line, the configuration or a model folder is wrong; 3 the data is wrong; 75 stopped
on request, to be resumed with the same command; 76 the same before this start made a step; 1 anything else.
"""

import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable

from openkto.config.values import BOOLEANS
from openkto.errors import OpenKTOError, StopError
from openkto.masking import masked, masked_value
from openkto.process.launcher import follow_launcher
from openkto.process.limits import is_panic
from openkto.process.ranks import loss_of_a_rank, settle_ranks

SECONDS_FOR_THE_FIRST_RANK = 3.0


def run(main: Callable[[list[str]], None], argv: list[str]) -> int:
    """Run the command and return its exit status."""
    debug = _is_on("debug", argv)
    # Asked now: to DeepSpeed LOCAL_RANK is the device's number, and `start_process` makes it so.
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID", "0")
    try:
        sys.argv[1:] = map(masked_value, sys.argv[1:])  # trackers write down by themselves how a program was started
        settle_ranks()
        follow_launcher()
        _set_up_logging(is_verbose=_is_on("verbose", argv))
        main(argv)
        return 0
    except StopError as stop:
        # All ranks stop together, for the same reason: one of them says it.
        if os.environ.get("RANK", "0") == "0":
            print(f"stopped: {stop}", file=sys.stderr)
        return stop.exit_code
    except OpenKTOError as error:
        if debug:
            _print_traceback()
        else:
            if local_rank != "0":
                # What all ranks of a node find is said by its first: the launcher ends the others meanwhile.
                time.sleep(SECONDS_FOR_THE_FIRST_RANK)
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        if debug:
            _print_traceback()
        else:
            print(f"error: rank {os.environ.get('RANK', '0')}: {masked(_unexpected(error))}", file=sys.stderr)
        return 1


def _print_traceback() -> None:
    print(masked(traceback.format_exc()), end="", file=sys.stderr)


def _unexpected(error: BaseException) -> str:
    lost = loss_of_a_rank(error)
    if lost is not None:
        return lost
    if isinstance(error, OSError) and error.filename is not None:
        place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else error.filename
        return f"{place}: must be read or written; got {error.strerror}. Give it other permissions or name another."
    first_line = (str(error).strip().splitlines() or [""])[0]
    if type(error).__name__ == "OutOfMemoryError":
        return (
            f"the GPU's memory is full ({first_line}). Lower --micro_train_batch_size or --max_len, pass "
            "--gradient_checkpointing or --share_prompts off, or raise --zero_stage."
        )
    return (
        f"{type(error).__name__}: {first_line} Pass --debug to see where; please report it if it is not a mistake on "
        "your side."
    )


def run_and_exit(main: Callable[[list[str]], None], argv: list[str]) -> None:
    """Run the command and end the process with its status."""
    status = run(main, argv)
    if "openkto.distributed.launch" not in sys.modules:
        sys.exit(status)
    from openkto.distributed.launch import end_process

    if status == 0:
        end_process()
    # A process with gloo's threads sometimes aborts in the interpreter's own way out, after all its work.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _say_of_thread(failed: threading.ExceptHookArgs) -> None:
    """Say in one line that a library's own thread ended, such as TensorBoard's writer on a full disk."""
    logging.getLogger("openkto").warning(
        "warning: a background thread ended (%s: %s); training continues.", failed.exc_type.__name__, failed.exc_value
    )


def _is_on(name: str, argv: list[str]) -> bool:
    """Return whether a switch is given, before the command line is read."""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        flag, _, value = word.partition("=")
        if flag == f"--{name}":
            return BOOLEANS.get((value or following).lower(), True)
    return False


class MaskedFormatter(logging.Formatter):
    """Leaves passwords and keys in addresses out of what is logged, by libraries too."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return masked(super().format(record))


def _set_up_logging(*, is_verbose: bool) -> None:
    """Let rank 0 speak at INFO on stderr (verbose: of all), the others only of errors, and threads in one line."""
    threading.excepthook = _say_of_thread
    level = logging.DEBUG if is_verbose else logging.INFO
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(MaskedFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("openkto").setLevel(level if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    # It has a handler of its own, so each of its lines would come twice.
    logging.getLogger("huggingface_hub").propagate = False
    if not is_verbose:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # These two set the levels of their loggers themselves, when they are imported.
        for library in ("TRANSFORMERS", "DATASETS"):
            os.environ.setdefault(f"{library}_VERBOSITY", "error")
    # DeepSpeed's calls into torch.distributed, which its users can do nothing about.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # peft's questions to transformers, and ours, under old names.
    old = "`(is_gradient_checkpointing|gradient_checkpointing_enable|gradient_checkpointing_disable)` is deprecated"
    warnings.filterwarnings("ignore", category=FutureWarning, message=old)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
