"""`openkto report` as a script: `python cli/report.py --help`."""

import sys

from openkto.commands.report import main
from openkto.commands.run import run_and_exit

if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
