"""Ends a rank when its launcher has died, since after `kill -9` of torchrun or deepspeed the rank would train on."""

import contextlib
import os
import signal
import threading
import time

from openkto.process.processes import launchers

LOOK_SECONDS = 0.5
SECONDS_TO_STOP = 300.0  # for the step that is under way and a save


def follow_launcher() -> None:
    """Watch from now on whether the launchers that started this process live.

    A rank whose launcher is gone stops as at SIGTERM: with a checkpoint where it trains, at once where it does not yet.
    """
    watched = launchers() if "RANK" in os.environ else []
    if not watched:
        return

    def watch() -> None:
        while all(launcher.is_running() for launcher in watched):
            time.sleep(LOOK_SECONDS)
        dead = next(launcher for launcher in watched if not launcher.is_running())
        _say(f"rank {os.environ['RANK']}: its launcher (process {dead.pid}) is gone; it stops, too")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SECONDS_TO_STOP)
        _say(f"rank {os.environ['RANK']}: did not stop within {SECONDS_TO_STOP:.0f} s; it ends")
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="launcher").start()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the launcher's end of a pipe is gone with it
        os.write(2, f"{text}\n".encode())
