"""`openkto <command>`, `python -m openkto <command>` and `deepspeed --module openkto <command>`."""

import difflib
import sys

from openkto import __version__
from openkto.commands import (
    completion,
    convert_checkpoint,
    evaluate,
    inspect,
    merge_lora,
    plan,
    precompute_reference,
    push,
    report,
    schema,
    train,
)
from openkto.commands.run import run_and_exit
from openkto.config.flags import DESCRIPTIONS
from openkto.errors import ConfigError

COMMANDS = {
    "inspect": inspect.main,
    "plan": plan.main,
    "train": train.main,
    "precompute_reference": precompute_reference.main,
    "evaluate": evaluate.main,
    "report": report.main,
    "merge_lora": merge_lora.main,
    "convert_checkpoint": convert_checkpoint.main,
    "push": push.main,
    "schema": schema.main,
    "completion": completion.main,
}


def dispatch(argv: list[str]) -> None:
    """Run the command that the first word names.

    The deepspeed launcher puts its own --local_rank before it.

    Raises:
        ConfigError: there is no such command.
    """
    launcher = [word for word in argv[:1] if word.startswith("--local_rank")]
    words = argv[len(launcher) :]
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return
    if words[0] == "--version":
        print(f"openkto {__version__}")
        return
    if words[0] not in COMMANDS:
        nearest = difflib.get_close_matches(words[0], COMMANDS, n=1, cutoff=0.5)
        cure = f"The most similar name is {nearest[0]}." if nearest else "Name one of them."
        raise ConfigError(f"openkto: the command must be one of {', '.join(COMMANDS)}; got {words[0]}. {cure}")
    COMMANDS[words[0]](launcher + words[1:])


def overview() -> str:
    """Return what `openkto --help` shows: a line a command."""
    width = max(map(len, DESCRIPTIONS))
    lines = [f"  {name.ljust(width)}  {text.partition('. ')[0].rstrip('.')}." for name, text in DESCRIPTIONS.items()]
    head = "usage: openkto COMMAND [--flag value ...]; openkto COMMAND --help lists its flags."
    check = "openkto train ... --check reads the configuration and all rows, says what it found, and trains nothing."
    return "\n".join([head, "", *lines, "", check])


def main() -> None:
    """Entry point of the installed `openkto`."""
    run_and_exit(dispatch, sys.argv[1:])


if __name__ == "__main__":
    main()
