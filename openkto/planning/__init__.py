"""What a run will take before it starts: memory, time, and which settings fit."""
