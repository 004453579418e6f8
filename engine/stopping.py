"""When a text ends. Works on verified tokens only; knows no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.sampler import Sampling


class Stopper:
    """Decides the finish reason after each token: `stop`, `stop_string`, `length` or None."""

    def __init__(self, sampling: Sampling, decode: Callable[[Sequence[int]], str] | None):
        if sampling.stop_strings and decode is None:
            raise ValueError("stop_strings need a tokenizer: give the engine `decode`, or use "
                             "stop_ids")
        self.stop_ids = frozenset(sampling.stop_ids)  # membership only, never iterated
        self.stop_strings = sampling.stop_strings
        self.decode = decode
        # Tokens that can hold the end of the longest stop string, with room for tokens that
        # decode to nothing.
        self.window = 4 * max((len(s) for s in sampling.stop_strings), default=0) + 32

    def reason(self, response: Sequence[int], limit: int) -> str | None:
        """Finish reason after the last token of `response`; a stop id wins over the others."""
        if response[-1] in self.stop_ids:
            return "stop"
        if self.stop_strings and self._completed(response):
            return "stop_string"
        return "length" if len(response) >= limit else None

    def _completed(self, response: Sequence[int]) -> bool:
        text = self.decode(response[-self.window:])
        return any(stop in text for stop in self.stop_strings)


def shown_text(text: str, stop_strings: Sequence[str]) -> str:
    """`text` cut before the first stop string: only what is shown, never what is trained."""
    ends = [text.find(stop) for stop in stop_strings]
    return text[:min((end for end in ends if end >= 0), default=len(text))]
