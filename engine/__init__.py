"""Rollout engine: schedules, paged KV, passes, keyed sampling."""

from engine.engine import Completion, Engine, Request, Rollout
from engine.plan import Capacity
from engine.sampler import Sampling

__all__ = ["Capacity", "Completion", "Engine", "Request", "Rollout", "Sampling"]
