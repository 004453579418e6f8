"""Counts of a schedule: passes, rows, cells, catch-up, exit depths. Integers, no torch.

One place for what the generation command, the trainer's metrics, the picture and the
benchmark report.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from engine.engine import Rollout
from engine.plan import Pass
from rollout.log import ScheduleLog


@dataclass(frozen=True)
class Statistics:
    """What a schedule cost. Prompts are included everywhere.

    Attributes:
        sequences, prompt_tokens, tokens: sequences, their prompt and their response tokens.
        passes: executions of the shared stack, over all sequences together.
        spans: passes counted once for each sequence that takes part.
        rows: rows of all passes, which is the number of cells computed.
        padded_rows: the same with the padding of row counts.
        dense_cells: cells that `dense` computes for the same tokens: every position that is an
            input (the last token of a response is not), at every loop.
        catch_up_rows: cells of older positions that ran because a newer one needed their loop
            (after the first token of their sequence; prompt cells put off until then count).
        peak_catch_up: most of them in one span.
        depths: response tokens read out at loop 1..T, in that order.
    """

    sequences: int
    prompt_tokens: int
    tokens: int
    passes: int
    spans: int
    rows: int
    padded_rows: int
    dense_cells: int
    catch_up_rows: int
    peak_catch_up: int
    depths: tuple[int, ...]

    @property
    def passes_per_token(self) -> float:
        """Passes that a sequence takes part in for one of its tokens; T for `dense` after the
        prompt, whatever the batch."""
        return self.spans / self.tokens

    @property
    def rows_per_pass(self) -> float:
        """Mean rows of a pass: how much work shares one read of the weights."""
        return self.rows / self.passes

    @property
    def cell_share(self) -> float:
        """Cells computed, as a share of what `dense` computes."""
        return self.rows / self.dense_cells

    @property
    def depth_shares(self) -> tuple[float, ...]:
        """Share of the response tokens read out at loop 1..T."""
        return tuple(count / self.tokens for count in self.depths)

    @property
    def mean_depth(self) -> float:
        """Mean exit depth of the response tokens."""
        return sum(loop * count for loop, count in enumerate(self.depths, 1)) / self.tokens

    def __add__(self, other: Statistics) -> Statistics:
        """Of two logs of one model together; the peak is the larger one."""
        mine, theirs = asdict(self), asdict(other)
        both = {name: mine[name] + theirs[name] for name in mine}
        depths = tuple(a + b for a, b in zip(self.depths, other.depths, strict=True))
        return Statistics(**both | {"depths": depths,
                                    "peak_catch_up": max(self.peak_catch_up, other.peak_catch_up)})


def statistics(log: ScheduleLog | Rollout) -> Statistics:
    """Count what a log (or an engine run) executed."""
    loops, completions = log.header["loops"], log.completions
    prompts = [len(c.request.prompt) for c in completions]
    tokens = list(prompts)  # of each sequence so far
    depths = [0] * loops
    passes = spans = rows = padded_rows = catch_up = peak = 0
    for event in log.events:
        if not isinstance(event, Pass):
            continue
        passes += 1
        spans += len(event.spans)
        padded_rows += event.padded_rows
        for number, _, start, stop in event.spans:
            rows += stop - start
            if tokens[number] > prompts[number]:
                older = min(stop, tokens[number] - 1) - start
                catch_up += older
                peak = max(peak, older)
        for readout in event.readouts:
            tokens[readout.sequence] += 1
            depths[readout.loop - 1] += 1
    responses = [len(c.token_ids) for c in completions]
    inputs = sum(prompt + response - 1 for prompt, response in zip(prompts, responses, strict=True))
    return Statistics(
        sequences=len(completions), prompt_tokens=sum(prompts), tokens=sum(responses), passes=passes,
        spans=spans, rows=rows, padded_rows=padded_rows, dense_cells=inputs * loops,
        catch_up_rows=catch_up, peak_catch_up=peak, depths=tuple(depths))


def decoding(log: ScheduleLog | Rollout) -> tuple[int, int]:
    """(passes, tokens): passes until every sequence has its first token, and tokens read out later.

    What comes after those passes is decoding: all tokens after the last prompt was read out. A
    sequence that was quicker may have had more than one token before. Prompt cells that a schedule
    puts off and runs later are part of decoding.
    """
    waiting = set(range(len(log.completions)))
    tokens = sum(len(c.token_ids) for c in log.completions)
    passes = 0
    for event in log.events:
        if not waiting:
            break
        if isinstance(event, Pass):
            passes += 1
            tokens -= len(event.readouts)
            waiting -= {readout.sequence for readout in event.readouts}
    return passes, tokens
