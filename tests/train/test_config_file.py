import json
import math
import tomllib
from dataclasses import replace

import pytest

from engine.plan import Capacity
from train.config import DataOptions, LearnerOptions, ModelOptions, RolloutOptions, RunOptions, TrainConfig
from train.config_file import SECTIONS, difference, fingerprint, load, loads, to_table, to_toml
from train.settings import leaves

MINIMAL = ("model.path=m", "data.task=calculator")


def test_file_and_overrides(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\npath = "models/a"\n[data]\npath = "p.jsonl"\nreward = "r.py:score"\nlimit = 5\n'
        '[rollout]\ntemperature = 1\nstop = ["\\n", "Q:"]\n[rollout.capacity]\npages = 64\n'
        "[learner]\nbetas = [0.9, 0.99]\ndenominator = 512\nclip_norm = inf\n[run]\n"
    )
    config = load(file, ["run.steps=7", "rollout.capacity.max_span=8", "learner.learning_rate=1e-5", "run.steps=9"])
    assert config.data == DataOptions(path="p.jsonl", reward="r.py:score", limit=5)
    assert config.rollout == RolloutOptions(temperature=1.0, stop=("\n", "Q:"), capacity=Capacity(pages=64, max_span=8))
    assert type(config.rollout.temperature) is float and type(config.learner.denominator) is float
    assert config.learner == LearnerOptions(1e-5, betas=(0.9, 0.99), denominator=512.0, clip_norm=math.inf)
    assert config.run.steps == 9


@pytest.mark.parametrize(
    "override, value",
    [
        ("learner.denominator=tokens", "tokens"),
        ("learner.denominator=1e3", 1000.0),
        ("learner.recompute=true", True),
        ("learner.betas=0.8, 0.9", (0.8, 0.9)),
        ("learner.betas=[0.8, 1e-1]", (0.8, 0.1)),
        ("run.trackers=", ()),
        ("run.trackers=tensorboard,wandb", ("tensorboard", "wandb")),
        ('rollout.stop=["a,b"]', ("a,b",)),
        ("data.limit=none", None),
        ("data.limit=12", 12),
        ("data.answer_field=none", None),
        ("data.reward=a.py:f=g", "a.py:f=g"),
        ("run.from_logs=runs/none", "runs/none"),
    ],
)
def test_overrides_take_the_type_of_their_field(override, value):
    name = override.partition("=")[0]
    found = loads("", [*MINIMAL, override])
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "override, parts",
    [
        ("rollout.group_size=8.5", ["rollout.group_size", "'8.5'", "an integer"]),
        ("learner.recompute=yes", ["learner.recompute", "'yes'", "true or false"]),
        ("learner.betas=0.9", ["learner.betas", "2 numbers"]),
        ("learner.betas=0.9,0.9,0.9", ["learner.betas", "2 numbers"]),
        ("learner.betas=[0.9", ["learner.betas", "2 numbers"]),
        ("rollout.temperature=nan", ["rollout.temperature", "number"]),
        ("rollout.capacity.pages=0", ["capacity", "pages = 0"]),
        ("run.steps", ["section.key=value"]),
        ("model.dtype=float16", ["model.dtype", "bfloat16"]),
    ],
)
def test_bad_overrides_are_refused_with_field_and_remedy(override, parts):
    with pytest.raises(ValueError) as caught:
        loads("", [*MINIMAL, override])
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    "name, meant",
    [
        ("rollout.temprature", "rollout.temperature"),
        ("rollout.max_new_token", "rollout.max_new_tokens"),
        ("learner.learning-rate", "learner.learning_rate"),
        ("learner.temperature", "rollout.temperature"),
        ("rollout.learning-rate", "learner.learning_rate"),
        ("rollout.max-grad-norm", "learner.clip_norm"),
        ("model.report_path", "model.path"),
        ("run.portion", "run.rollout_only"),
        ("max_rows", "rollout.capacity.max_rows"),
        ("data.schedule", "rollout.schedule or learner.schedule"),
        ("learner.lr", "learner.learning_rate"),
        ("rollout.num_generations", "rollout.group_size"),
        ("learner.mask_truncated_completions", "learner.mask_truncated"),
        ("learner.loss_agg_mode", "learner.denominator"),
        ("algorithm.adv_estimator", "learner.advantage"),
        ("run.steps.x", "run.steps"),
    ],
)
def test_unknown_settings_name_the_nearest_known_one(name, meant):
    with pytest.raises(ValueError) as caught:
        loads("", [*MINIMAL, f"{name}=1"])
    assert f"unknown setting {name}: did you mean {meant}?" == str(caught.value)


@pytest.mark.parametrize(
    "name, word",
    [
        ("lora.rank", "LoRA"),
        ("learner.use_peft", "LoRA"),
        ("rollout.multi_turn", "multi-turn"),
        ("rollout.tools", "tools"),
        ("run.fsdp", "FSDP"),
        ("learner.zero_stage", "ZeRO"),
        ("rollout.tensor_parallel_size", "tensor"),
        ("run.tp", "tensor"),
        ("model.quantization", "quantisation"),
        ("model.load_in_4bit", "quantisation"),
        ("rollout.server_port", "HTTP server"),
        ("rollout.use_vllm", "HTTP server"),
        ("rollout.async_rollouts", "asynchronous"),
        ("rollout.top_p", "truncated"),
        ("rollout.top_k", "truncated"),
        ("rollout.min_p", "truncated"),
        ("rollout.repetition_penalty", "penalised"),
        ("model.fp16", "float16"),
    ],
)
def test_what_is_deliberately_absent_is_refused_by_name(name, word):
    with pytest.raises(ValueError) as caught:
        loads("", [*MINIMAL, f"{name}=1"])
    message = str(caught.value)
    assert message.startswith(f"{name}: ") and word in message and message.count(". ") == 0


def test_no_setting_is_shadowed_by_the_absent_list():
    """A misspelling of a real setting must not be answered with a sentence about something else."""
    for name in leaves(TrainConfig):
        with pytest.raises(ValueError, match="did you mean"):
            loads("", [*MINIMAL, f"{name}x=1"])


@pytest.mark.parametrize(
    "text, words",
    [
        ("[lora]\n", "LoRA"),
        ("model = 3", "model is a section"),
        ("[sampler]\n", "unknown setting sampler"),
        ("[rollout]\ntop_p = 0.9", "truncated"),
    ],
)
def test_sections_are_checked_too(text, words):
    with pytest.raises(ValueError) as caught:
        loads(text, MINIMAL)
    assert words in str(caught.value)


def test_sections_are_those_of_the_dataclasses():
    assert {name.rpartition(".")[0] for name in leaves(TrainConfig)} == set(SECTIONS)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.toml"):
        load(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ValueError, match=r"bad\.toml: not valid TOML"):
        load(tmp_path / "bad.toml")


def unusual():
    """Every kind of value, with text that needs escapes."""
    return TrainConfig(
        model=ModelOptions(path='dir with "quotes"\\back\x7f\u2028\U0001f600'),
        data=DataOptions(task="gsm8k", limit=3, answer_field=None),
        rollout=RolloutOptions(stop=("\n\n", "\t#", "é"), temperature=0.1 + 0.2, capacity=Capacity(pages=3)),
        learner=LearnerOptions(clip_norm=math.inf, eps=1e-30, denominator=3e17, recompute=True),
        run=RunOptions(trackers=(), seed=2**64 - 1),
    )


def test_written_configuration_reads_back_whole():
    text = to_toml(unusual())
    assert loads(text) == unusual()
    assert set(tomllib.loads(text)) == {"model", "data", "rollout", "learner", "run"}
    for name in leaves(TrainConfig):
        assert f"\n{name.rpartition('.')[2]} = " in text


def test_table_is_plain():
    table = to_table(unusual())
    assert table["rollout"]["stop"] == ["\n\n", "\t#", "é"] and table["data"]["answer_field"] == "none"
    assert json.loads(json.dumps(table)) == table


BASE = loads("", [*MINIMAL])
OTHER = {
    "model.dtype": "bfloat16", "model.profile": "fused", "data.long_prompts": "skip", "learner.schedule": "linear",
    "learner.advantage": "none", "learner.denominator": "7", "learner.replay": "always", "learner.betas": "0.1,0.2",
    "learner.dense_dtype": "float32", "learner.recompute": "true", "run.rollout_only": "true", "model.device": "cuda",
    "rollout.prompts_per_step": "40", "rollout.cohorts": "8", "learner.updates_per_rollout": "2",
    "learner.audit_cohorts": "2", "learner.kl_coefficient": "0.5", "learner.clip_low": "0.5",
    "learner.min_ratio": "0.5", "learner.mask_truncated": "true", "rollout.capacity.max_rows": "300", "run.trackers": "wandb",
    "rollout.stop": "x", "model.numerics": "auto", "model.linear": "packed",
}  # fmt: skip


@pytest.mark.parametrize("name", leaves(TrainConfig))
def test_only_the_listed_settings_may_change_at_resume(name):
    if name == "learner.gate_objective":
        return  # has one value only
    base = replace(BASE, learner=replace(BASE.learner, reference="initial"))
    text = to_toml(base)
    kind = str(leaves(TrainConfig)[name])
    changed = loads(text, [f"{name}={OTHER.get(name, '11' if 'int' in kind or 'float' in kind else 'other')}"])
    assert changed != base
    forbidden = difference(base, changed)
    if name in (
        "run.steps",
        "run.save_every",
        "run.eval_every",
        "run.log_every",
        "run.dir",
        "run.resume",
        "run.trackers",
    ):
        assert forbidden == [] and fingerprint(base) == fingerprint(changed)
    else:
        assert any(sentence.startswith(f"{name} was ") for sentence in forbidden)
        assert fingerprint(base) != fingerprint(changed)


def test_run_length_may_not_move_a_falling_rate():
    """run.steps may change at resume, but not where it is the horizon of the learning rate."""
    linear = loads("", [*MINIMAL, "learner.schedule=linear", "run.steps=50"])
    longer = replace(linear, run=replace(linear.run, steps=80))
    assert difference(linear, longer)[0].startswith("learner.schedule_steps was 50 and is now 80")
    pinned = replace(longer, learner=replace(linear.learner, schedule_steps=50))
    assert difference(linear, pinned) == [] and fingerprint(linear) == fingerprint(pinned)
