"""What a run is as a process: signals, its time limit, its watchdog, its lock, the launcher above it."""
