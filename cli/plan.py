"""`openkto plan` as a script: `python cli/plan.py --help`."""

import sys

from openkto.commands.plan import main
from openkto.commands.run import run_and_exit

if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
