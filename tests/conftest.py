"""Settings for every test: one torch thread, and property tests that repeat themselves.

One thread, because bits may depend on the thread count and because the suite runs in two
processes on two cores. Hypothesis without a deadline and derandomised: no test may depend on
the machine's speed, and a failure must come back when the suite is run again. Found shape rules
are not taken from earlier runs.
"""

import os
import tempfile

import hypothesis
import torch

torch.set_num_threads(1)

hypothesis.settings.register_profile("reprise", deadline=None, derandomize=True,
                                     suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("reprise")

_memory = tempfile.TemporaryDirectory()
os.environ["XDG_CACHE_HOME"] = _memory.name
