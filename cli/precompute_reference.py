"""`openkto precompute_reference` as a script: `deepspeed --num_gpus 8 cli/precompute_reference.py --help`."""

import sys

from openkto.commands.precompute_reference import main
from openkto.commands.run import run_and_exit

if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
