"""Small rollouts to log, and a second, plain reading of a log's bytes with which tests forge logs."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import torch
from tiny_models import tiny_model, tokens

from engine import Capacity, Engine, Request, Sampling
from rollout.log import from_rollout

SCHEDULES = ("dense", "exit:2", "exit:gate=0.5,min=1,max=3", "exit:periodic=1,3", "exit:mix=1:1,2:1,3:2")
SMALL = Capacity(max_sequences=3, max_rows=12, max_span=5, pages=64, page_size=8)


def rollout_log(schedule="exit:gate=0.5,min=1,max=3", *, dtype=torch.float32, seed=3, count=5, new=10, greedy=False,
                capacity=SMALL, model=None, stop_ids=(3, 7)):
    """(model, log) of `count` sequences with prompts of 2, 5, 8, ... tokens, up to `new` new ones."""
    model = model or tiny_model(dtype=dtype)
    requests = [Request(tuple(tokens(2 + 3 * i, 29, i)), new, uid=2**63 + i, dataset="set", example=f"e{i}",
                        group=i // 2, sample=i % 2) for i in range(count)]
    sampling = Sampling(seed=seed, temperature=0.8, greedy=greedy, stop_ids=stop_ids)
    return model, from_rollout(Engine(model, schedule, capacity).generate(requests, sampling))


def take_apart(data: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """(JSON part, arrays by name) of a log's bytes; arrays can be written to."""
    length = int.from_bytes(data[12:20], "little")
    described, at = json.loads(data[20:20 + length]), 20 + length
    arrays = {}
    for name, kind, count in described["arrays"]:
        arrays[name] = np.frombuffer(data, kind, count, at).copy()
        at += arrays[name].nbytes
    return described, arrays


def put_together(described: dict, arrays: dict[str, np.ndarray], version: int = 2) -> bytes:
    """The bytes of a log, with counts and digest as if it had been written so."""
    described["arrays"] = [[name, array.dtype.str.replace("|", "<"), len(array)] for name, array in arrays.items()]
    text = json.dumps(described, sort_keys=True, separators=(",", ":")).encode()
    body = b"REPRISE\n" + version.to_bytes(4, "little") + len(text).to_bytes(8, "little") + text
    body += b"".join(array.tobytes() for array in arrays.values())
    return body + hashlib.sha256(body).digest()


def forge(data: bytes, change) -> bytes:
    """`data` after change(described, arrays), with the digest made anew."""
    described, arrays = take_apart(data)
    change(described, arrays)
    return put_together(described, arrays)
