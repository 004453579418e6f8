"""Looped models: three verbs, families, checkpoints, numerics and the one log-prob function."""
