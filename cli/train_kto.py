"""`openkto train` as a script, for launchers: `deepspeed --num_gpus 8 cli/train_kto.py --help`."""

import sys

from openkto.commands.run import run_and_exit
from openkto.commands.train import main

if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
