"""The learner: one gradient a cohort, a fixed tree over cohorts, one AdamW step, publication.

Log-probabilities have the value of the replay and the gradient of the dense forward. Under
numerics `invariant` the two have the same bits: every training forward is then compared with
the values that it trains on, and nothing is replayed while the weights are those of the rollout.
Knows logs and advantages; not the engine, prompts, rewards or files.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.looped import LoopedLM
from rollout.log import ScheduleLog
from train.config import TrainConfig
from train.dense import dense_logprobs
from train.hybrid import hybrid
from train.loss import NO_TOKENS, LossMetrics, grpo_loss, usable, weigh
from train.masters import Masters
from train.optimizer import FlatAdamW, learning_rate
from train.reduction import tree_sum
from train.replay import Replayed, check_contract, locate, mismatches, recorded, replay_cheapest

# Where the time of a step goes, in `seconds/<phase>`: hashing weights that an update changed; replays (audits, newer
# weights, the reference) and what the loss needs of them; training forwards and backwards; adding gradients along the
# tree; norm and AdamW; casting the masters into the compute copy, and packing it again.
PHASES = ("digest", "replay", "dense", "reduction", "optimizer", "publication")


@dataclass(frozen=True)
class Batch:
    """One cohort as the learner takes it.

    Attributes:
        index: cohort index c. log: its schedule log.
        advantages: one a sequence. trained: False leaves the sequence out of loss and denominator.
    """

    index: int
    log: ScheduleLog
    advantages: tuple[float, ...]
    trained: tuple[bool, ...]


@dataclass(frozen=True)
class _Prepared:
    """A batch with its values, all float32 or bool [tokens], sequence after sequence.

    weight: float64. counted: what the batch adds to the denominator of its update.
    """

    batch: Batch
    old: Tensor
    value: Tensor
    reference: Tensor | None
    advantage: Tensor
    chosen: Tensor
    weight: Tensor
    counted: int
    starts: tuple[int, ...]


class Learner:
    """Owns masters, optimizer and the compute copy `model`, which the engine uses too.

    Attributes:
        model: compute copy; version n after n optimizer steps.
        reference: frozen model of the KL penalty, or None.
    """

    def __init__(self, config: TrainConfig, model: LoopedLM, masters: Masters,
                 reference: LoopedLM | None):
        options = config.learner
        self.config, self.model, self.masters, self.reference = config, model, masters, reference
        self.optimizer = FlatAdamW(masters.flat, masters.layout.decayed, betas=options.betas,
                                   eps=options.eps, weight_decay=options.weight_decay,
                                   clip_norm=options.clip_norm)
        self.dense_model = model
        if options.dense_dtype == "float32" and model.dtype != torch.float32:
            self.dense_model = LoopedLM(
                model.config, {name: w.to(torch.float32) for name, w in model.weights.items()},
                profile=model.profile, version=model.version)

    @property
    def exact(self) -> bool:
        """Whether the dense forward has the sampler's bits."""
        return self.model.rule is not None and self.dense_model is self.model

    def publish(self) -> None:
        """Make the compute copy one cast of the masters; its version is the update count."""
        self.model.publish(self.masters.tensors(), self.optimizer.updates)
        if self.dense_model is not self.model:
            self.dense_model.publish(self.model.weights, self.optimizer.updates)

    def step(self, batches: Sequence[Batch], step: int) -> dict[str, float]:
        """All updates of one rollout; metrics of it (ratio metrics are those of the first update).

        RuntimeError when a replay differs from its rollout in any bit, naming the place.
        """
        options = self.config.learner
        share = len(batches) // options.updates_per_rollout
        parts = [batches[at:at + share] for at in range(0, len(batches), share)]
        report = _Report()
        self._audit(batches[share:] if self.exact else batches, step, report)
        for _ in range(options.epochs):
            for part in parts:
                self._update(part, step, report)
        return report.summary()

    def _audit(self, batches: Sequence[Batch], step: int, report: _Report) -> None:
        """Replay the audited ones of these cohorts and compare. All before the first update: after it the
        weights are no longer those of the rollout, and cohorts of later updates could not be audited."""
        digest, always, audited = self.model.digest(), self.config.learner.replay == "always", self.audited(step)
        report.lap("digest")
        for batch in batches:
            if batch.log.header["weights"] == digest and (always or batch.index in audited):
                value = replay_cheapest(self.model, batch.log, same_weights=False)  # the digest has been compared
                self._compare(batch, step, recorded(batch.log), value)
                report.audited += len(value.values)
        report.lap("replay")

    def _update(self, batches: Sequence[Batch], step: int, report: _Report) -> None:
        digest = self.model.digest()
        report.lap("digest")
        prepared = [self._prepare(batch, digest, report) for batch in batches]
        tokens = sum(int(p.chosen.sum()) for p in prepared)
        denominator = self.config.learner.denominator
        if isinstance(denominator, str):  # 0 without a trained token; then no loss is computed
            denominator = float(sum(p.counted for p in prepared))
        report.lap("replay")

        def leaf(index: int) -> Tensor:
            report.lap("reduction")  # what the tree added since the last leaf
            gradient = self._gradient(prepared[index], denominator, report)
            report.lap("dense")
            return gradient

        gradient = tree_sum(leaf, len(prepared))
        report.lap("reduction")
        done = self.optimizer.step(gradient, learning_rate(step, self.config))
        report.lap("optimizer")
        self.publish()
        report.lap("publication")
        report.updates.append((done.gradient_norm, tokens))
        report.close_update()

    def _prepare(self, batch: Batch, digest: str, report: _Report) -> _Prepared:
        log = batch.log
        check_contract(self.model, log, same_weights=False)
        old = value = recorded(log)
        if log.header["weights"] != digest:
            value = replay_cheapest(self.model, log, same_weights=False)
        reference = None
        if self.reference is not None:
            reference = replay_cheapest(self.reference, log, same_weights=False).values
        lengths = torch.tensor([len(c.token_ids) for c in log.completions])
        advantage = torch.tensor(batch.advantages, dtype=torch.float64).to(torch.float32)
        trained = torch.tensor([flag for flags in log.trained for flag in flags])
        trained &= torch.tensor(batch.trained).repeat_interleave(lengths)
        finite = usable(old.values) & usable(value.values)
        if reference is not None:
            finite &= usable(reference)
        report.unusable += int((trained & ~finite).sum())
        chosen = trained & finite
        weight, counted = weigh(chosen, old.starts, self.config.learner.denominator)
        return _Prepared(batch, old.values, value.values, reference,
                         advantage.repeat_interleave(lengths), chosen, weight, counted, old.starts)

    def audited(self, step: int) -> tuple[int, ...]:
        """Cohorts whose replay is compared with the rollout in this step: keyed by (seed, step)."""
        options, count = self.config.learner, self.config.rollout.cohorts
        if (step - 1) % options.audit_every:
            return ()

        def key(cohort: int) -> bytes:
            return hashlib.blake2b(f"{self.config.run.seed} {step} {cohort}".encode()).digest()

        return tuple(sorted(sorted(range(count), key=key)[:options.audit_cohorts]))

    def _compare(self, batch: Batch, step: int, old: Replayed, value: Replayed) -> None:
        wrong = mismatches(value, old)
        if len(wrong):
            first = int(wrong[0])
            sequence, position = locate(batch.log, first)
            raise RuntimeError(
                f"step {step}, cohort {batch.index}: replay differs from the rollout in {len(wrong)} of "
                f"{len(old.values)} tokens, first at sequence {sequence}, position {position}: recorded "
                f"{old.values[first].item()!r}, replayed {value.values[first].item()!r}")

    def _compare_dense(self, prepared: _Prepared, first: int, found: Tensor, chosen: Tensor) -> None:
        """RuntimeError where `found`, the dense values from token `first` on, lacks the bits it trains on."""
        value = prepared.value[first:first + len(found)]
        wrong = torch.nonzero((found.view(torch.int32) != value.view(torch.int32)) & chosen)[:, 0]
        if len(wrong):
            at, batch = int(wrong[0]), prepared.batch
            sequence, position = locate(batch.log, first + at)
            raise RuntimeError(
                f"cohort {batch.index}: the training forward differs from the rollout in {len(wrong)} of "
                f"{len(found)} tokens, first at sequence {sequence}, position {position}: {value[at].item()!r} and "
                f"{found[at].item()!r}; numerics invariant does not hold, use model.numerics=shapes")

    def _gradient(self, prepared: _Prepared, denominator: float, report: _Report) -> Tensor:
        """Float32 gradient [size] of one cohort: its micro-batches in order, into one buffer."""
        gradient = torch.zeros_like(self.masters.flat)
        self.masters.collect_into(gradient)
        size, total = self.config.learner.micro_batch_sequences, len(prepared.batch.log.completions)
        for start in range(0, total, size):
            self._micro_batch(prepared, start, min(start + size, total), denominator, report)
        self.masters.collect_into(None)  # or the leaves would keep it, a copy of the weights, until the next step
        return gradient

    def _micro_batch(self, prepared: _Prepared, start: int, stop: int, denominator: float,
                     report: _Report) -> None:
        options, log = self.config.learner, prepared.batch.log
        tokens = slice(prepared.starts[start], prepared.starts[stop])
        chosen = prepared.chosen[tokens]
        if not chosen.any():
            return
        # Without an advantage and without a penalty the gradient is exactly 0: forward only.
        live = options.kl_coefficient != 0 or bool((prepared.advantage[tokens][chosen] != 0).any())
        with torch.set_grad_enabled(live):
            dense = dense_logprobs(
                self.dense_model, log.completions[start:stop], log.header["temperature"],
                weights=(lambda: self.masters.differentiable(self.dense_model)) if live else None,
                recompute=options.recompute, chunk=options.logprob_chunk)
            logp = hybrid(dense.logprobs, prepared.value[tokens].to(dense.logprobs.device))

            def pick(x: Tensor) -> Tensor:
                return x[chosen.to(x.device)].to(logp.device)

            reference = None if prepared.reference is None else pick(prepared.reference[tokens])
            loss, metrics = grpo_loss(
                pick(logp), pick(prepared.old[tokens]), pick(prepared.advantage[tokens]),
                clip_low=options.clip_low, clip_high=options.clip_high, denominator=denominator,
                weights=pick(prepared.weight[tokens]), reference_logp=reference, kl_coefficient=options.kl_coefficient)
            if live:
                loss.backward()
        found, value = dense.logprobs.detach().cpu(), prepared.value[tokens]
        if self.exact:
            self._compare_dense(prepared, tokens.start, found, chosen)
            report.audited += int(chosen.sum())
        difference = (found - value)[chosen].abs()
        report.add(metrics, pick(dense.entropy), difference)


class _Report:
    """Sums of one step, and a clock that runs from its making."""

    def __init__(self):
        self.first: LossMetrics | None = None  # of the first update, where the ratio must be 1
        self.current, self.total = NO_TOKENS, NO_TOKENS
        self.entropy, self.tokens = 0.0, 0
        self.differences: list[Tensor] = []
        self.updates: list[tuple[float, int]] = []
        self.unusable = self.audited = 0
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """The time since the last lap was spent in `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.last = now

    def add(self, metrics: LossMetrics, entropy: Tensor, difference: Tensor) -> None:
        self.current = self.current + metrics
        self.entropy += float(entropy.double().sum())
        self.tokens += len(entropy)
        self.differences.append(difference)

    def close_update(self) -> None:
        self.first = self.first or self.current
        self.total, self.current = self.total + self.current, NO_TOKENS

    def summary(self) -> dict[str, float]:
        first, total = self.first.summary(), self.total.summary()
        difference = torch.cat(self.differences) if self.differences else torch.zeros(1)
        return {
            **{f"loss/{name}": total[name] for name in ("loss", "kl", "clip_fraction_low",
                                                        "clip_fraction_high")},
            **{f"ratio/{name.removeprefix('ratio_')}": first[name]
               for name in ("ratio_min", "ratio_mean", "ratio_max", "ratio_not_one")},
            "policy/entropy": self.entropy / self.tokens if self.tokens else float("nan"),
            "policy/dense_minus_replay_mean": float(difference.mean()),
            "policy/dense_minus_replay_p95": float(torch.quantile(difference[:1_000_000], 0.95)),
            "policy/dense_minus_replay_max": float(difference.max()),
            "update/gradient_norm": self.updates[0][0],
            "update/trained_tokens": sum(tokens for _, tokens in self.updates),
            "update/unusable_tokens": self.unusable,
            "replay/audited_tokens": self.audited, "replay/mismatched_bits": 0,
            **{f"seconds/{name}": value for name, value in self.seconds.items()},
        }
