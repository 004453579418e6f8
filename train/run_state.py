"""What a run is resumed from: masters, moments, step, and what must not have changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from models.checkpoint import save_model
from models.looped import LoopedLM
from models.numerics import fingerprint
from train import checkpoint
from train.config import TrainConfig
from train.config_file import difference, loads, to_toml
from train.learner import Learner
from train.replay import check_process


@dataclass
class RunState:
    """The position of a run and its checkpoints.

    Attributes:
        data_digest: of the prompts, or of the logs that are trained on.
        grading_digest: of the reward's file and the stop settings ("" where logs are trained on).
        initial_digest: of the weights that the run started from.
        step: last finished training step.
    """

    config: TrainConfig
    data_digest: str
    grading_digest: str
    initial_digest: str
    step: int = 0

    @property
    def folder(self) -> Path:
        """Where the checkpoints lie."""
        return Path(self.config.run.dir) / "checkpoints"

    def save(self, learner: Learner) -> Path:
        """Write the checkpoint of this step: state to resume from, and the model for other tools."""
        tensors = {"master": learner.masters.flat, **{f"frozen.{name}": tensor for name, tensor
                                                      in learner.masters.frozen.items()},
                   **{f"optimizer.{name}": tensor for name, tensor in learner.optimizer.state().items()}}
        state = {"config": to_toml(self.config), "data": self.data_digest,
                 "grading": self.grading_digest,
                 "initial": self.initial_digest, "weights": learner.model.digest(),
                 "version": learner.model.version, "reference": _digest(learner.reference),
                 "kernels": learner.model.kernels, "fingerprint": fingerprint(learner.model.device)}
        return checkpoint.save(
            self.folder, self.step, tensors, state,
            lambda path: save_model(learner.model, path, source=self.config.model.path),
            self.config.run.keep)

    def load(self, path: Path, learner: Learner) -> None:
        """Continue from a checkpoint. Errors: ValueError naming a setting that changed,
        RuntimeError when data, weights or what decides bits in the process are not the same."""
        saved = checkpoint.load(path)
        tensors, state = saved.tensors, saved.state
        changed = difference(loads(state["config"]), self.config)
        if changed:
            raise ValueError(f"resume from {path}: {changed[0]}")
        check_process(learner.model.device, state["fingerprint"], f"the checkpoint {path}")
        data = "the prompts" if self.config.run.from_logs is None else "the logs"
        for name, own, what in (("data", self.data_digest, data),
                                ("grading", self.grading_digest, "the reward's file or the stop ids"),
                                ("initial", self.initial_digest, "the model folder's weights"),
                                ("reference", _digest(learner.reference), "the reference model's weights")):
            if state.get(name) != own:
                raise RuntimeError(f"resume from {path}: {what} have changed since the run began")
        if state["kernels"] != learner.model.kernels:
            raise RuntimeError(f"resume from {path}: the run was made with {state['kernels']}, this process resolves "
                               f"model.numerics and model.linear to {learner.model.kernels}")
        with torch.no_grad():
            learner.masters.flat.copy_(tensors["master"])
            for name, tensor in learner.masters.frozen.items():
                tensor.copy_(tensors[f"frozen.{name}"])
        learner.optimizer.load_state({name.removeprefix("optimizer."): tensor for name, tensor
                                      in tensors.items() if name.startswith("optimizer.")})
        learner.publish()
        if learner.model.digest() != state["weights"] or learner.model.version != state["version"]:
            raise RuntimeError(f"resume from {path}: the restored weights are not those that were saved")
        self.step = saved.step
        checkpoint.rewind(self.folder, self.step)


def _digest(model: LoopedLM | None) -> str | None:
    return None if model is None else model.digest()
