"""Log-probs by one dense forward with a graph, read out at the logged exit depths.

Shape letters: R packed rows, N response tokens, H hidden, V vocabulary. [N, V] never exists
whole: head and log-softmax run in chunks of tokens and are recomputed in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.engine import Completion
from models.dense import dense_forward, pack
from models.logprob import entropy, token_logprob
from models.looped import LoopedLM

DENSE_ROWS = 4096  # rows of one dense forward without a graph

Weights = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class DenseLogprobs:
    """Of all response tokens, sequence after sequence.

    logprobs: float32 [N] (float64 for float64 models), with a graph where weights have one.
    entropy: [N] in nats under the same temperature, no graph.
    """

    logprobs: Tensor
    entropy: Tensor


def dense_logprobs(model: LoopedLM, completions: Sequence[Completion], temperature: float, *,
                   weights: Weights | None = None, recompute: bool = False,
                   chunk: int = 2048) -> DenseLogprobs:
    """log softmax(logits / temperature) of every response token of `completions`.

    Loops run only as deep as the deepest exit among them. weights: see `dense_forward`.
    chunk: tokens whose logits exist at once.
    """
    # The last token of a response is read out, never an input.
    packed = pack([c.request.prompt + c.token_ids[:-1] for c in completions], model)
    depth = max(max(c.exit_depths) for c in completions)
    states = dense_forward(model, packed, depth, weights=weights, recompute=recompute)
    hidden = _read_rows(states, packed.starts, completions)
    ids = torch.tensor([i for c in completions for i in c.token_ids], device=model.device)
    head = weights() if weights else None
    entropies: list[Tensor] = []

    def score(h: Tensor, tokens: Tensor, index: int) -> Tensor:
        logits = model.readout(h, head)
        if len(entropies) == index:  # not again when backward recomputes the chunk
            with torch.no_grad():
                entropies.append(entropy(logits, temperature))
        return token_logprob(logits, tokens, temperature)

    parts = [checkpoint(score, h, tokens, index, use_reentrant=False)
             for index, (h, tokens) in enumerate(zip(hidden.split(chunk), ids.split(chunk), strict=True))]
    return DenseLogprobs(torch.cat(parts), torch.cat(entropies))


@torch.no_grad()
def dense_values(model: LoopedLM, completions: Sequence[Completion], temperature: float) -> Tensor:
    """Log-probs float32 [N] on the CPU, without a graph, a few sequences at a time."""
    parts = [dense_logprobs(model, batch, temperature).logprobs for batch in _batches(completions)]
    return torch.cat(parts).to(torch.float32).cpu()


def _batches(completions: Sequence[Completion]) -> Iterator[list[Completion]]:
    batch, rows = [], 0
    for completion in completions:
        more = len(completion.request.prompt) + len(completion.token_ids)
        if batch and rows + more > DENSE_ROWS:
            yield batch
            batch, rows = [], 0
        batch.append(completion)
        rows += more
    yield batch


def _read_rows(states: list[Tensor], starts: tuple[int, ...],
               completions: Sequence[Completion]) -> Tensor:
    """Hidden state [N, H] of each response token at its own exit depth."""
    rows, depths = [], []
    for start, completion in zip(starts[:-1], completions, strict=True):
        first = start + len(completion.request.prompt) - 1
        rows += range(first, first + len(completion.token_ids))
        depths += completion.exit_depths
    row, depth = torch.tensor(rows), torch.tensor(depths)
    order = torch.argsort(depth, stable=True)
    parts = [states[d - 1][row[order][depth[order] == d].to(states[0].device)]
             for d in sorted(set(depths))]
    return torch.cat(parts)[torch.argsort(order).to(states[0].device)]
