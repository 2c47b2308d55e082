"""`openkto evaluate` as a script, for launchers: `deepspeed --num_gpus 8 cli/evaluate_kto.py --help`."""

import sys

from openkto.commands.evaluate import main
from openkto.commands.run import run_and_exit

if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
