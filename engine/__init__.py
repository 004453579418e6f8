"""The rollout engine: plan, run, read out and sample, commit."""
