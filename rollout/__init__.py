"""Data, rewards, the schedule log and what generates with the engine."""
