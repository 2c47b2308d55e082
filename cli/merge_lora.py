"""`openkto merge_lora` as a script: `python cli/merge_lora.py --help`."""

import sys

from openkto.commands.merge_lora import main
from openkto.commands.run import run_and_exit

if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
