"""`openkto convert_checkpoint` as a script: `python cli/convert_checkpoint.py --help`."""

import sys

from openkto.commands.convert_checkpoint import main
from openkto.commands.run import run_and_exit

if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
