"""The probe: it finds the counts that scripted kernels need, sees every clause broken, and remembers."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import keep_rule, tiny_model, wide_model

from models import invariance, trials
from models.invariance import _holds, _search, adopt_rule, broken, find_rule, set_numerics
from models.linear import packed_unavailable
from models.rule import Rule, key_lengths, padded
from models.trials import Trial


@pytest.fixture(autouse=True)
def no_memory(monkeypatch, tmp_path):
    """Nothing is taken from earlier runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def kernel(**faults):
    """x * 3 row by row, with a fault: (least, most) rows in which it is right, or rows whose place shows."""
    def run(x):
        y, count = x * 3, len(x)
        if count < faults.get("least", 1) or count > faults.get("most", 10**9) or count % faults.get("multiple", 1):
            y = y + 1
        if faults.get("tail") and count % 4:
            y[count - count % 4:] += 1
        if faults.get("first"):
            y[0] += 1
        if faults.get("neighbour"):
            y = y + x.amax(0)
        return y
    return Trial("scripted", torch.arange(1024.0)[:, None].repeat(1, 2), run)


@pytest.mark.parametrize("faults, wanted", [
    ({}, (1, 1024)), ({"least": 3}, (4, 1024)), ({"least": 16}, (16, 1024)), ({"most": 32}, (1, 32)),
    ({"least": 2, "most": 70}, (2, 64)), ({"tail": True}, (4, 1024)), ({"least": 16, "most": 16}, (16, 16)),
    ({"multiple": 16, "most": 64}, (16, 64)), ({"first": True}, None), ({"neighbour": True}, None)])
def test_the_search_finds_what_a_scripted_kernel_needs(faults, wanted):
    assert _search(kernel(**faults), 1, list(trials.BLOCKS)) == wanted
    if wanted:
        assert _holds(kernel(**faults), *wanted)


def test_a_multiple_that_another_operator_needs_is_kept():
    assert _search(kernel(), 8, [256, 64]) == (8, 256)


def test_variants_must_have_the_same_bits():
    trial = kernel()
    assert not _holds(Trial("graph", trial.rows, trial.run, (lambda x: x * 3 + 1,)), 1, 16)


def test_a_rule_names_counts_that_fit():
    with pytest.raises(ValueError, match="row_block = 6 must be a multiple of rows = 4"):
        Rule(4, 6, 1, 1, 1, 1, 64)
    with pytest.raises(ValueError, match="queries = 0 must be a positive integer"):
        Rule(1, 1, 1, 1, 0, 1, 64)


def test_key_lengths_worked_by_hand():
    assert key_lengths(1) == [64] and key_lengths(300) == [64, 128, 192, 256, 384]
    assert key_lengths(2048)[-6:] == [384, 512, 768, 1024, 1536, 2048]
    assert padded(0, 4) == 0 and padded(5, 4) == 8


def test_shapes_and_unknown_modes():
    model = tiny_model(dtype=torch.float32)
    assert set_numerics(model, "shapes", length=8) == "numerics shapes, linear native" and model.rule is None
    with pytest.raises(ValueError, match="numerics = 'exact' is unknown; use one of shapes, invariant, auto"):
        set_numerics(model, "exact", length=8)


def test_where_nothing_holds_the_operator_is_named(monkeypatch):
    """invariant is refused, auto goes on with shapes and says why; a rule that stood before is gone."""
    model = keep_rule(tiny_model(dtype=torch.float32), 64)
    monkeypatch.setattr(invariance, "head_trials", lambda model: [kernel(first=True)])
    monkeypatch.setattr(invariance, "VERSION", "test")
    with pytest.raises(ValueError, match="numerics = 'invariant' does not hold on this machine: scripted: rows differ"):
        set_numerics(model, "invariant", length=64)
    assert model.rule is None
    assert "shapes, linear native, since invariant does not hold" in set_numerics(model, "auto", length=64)
    assert model.numerics == "shapes"


def test_answers_are_remembered_by_shapes_and_libraries(monkeypatch, tmp_path):
    model = keep_rule(tiny_model(dtype=torch.float32), 64)
    first, calls = model.rule, []
    monkeypatch.setattr(invariance, "find_rule", lambda *args: calls.append(args) or Rule(1, 1, 1, 1, 1, 1, 64))
    set_numerics(model, "invariant", length=60)  # the same key lengths
    assert model.rule == first and not calls
    for other in ({"dtype": torch.bfloat16}, {"profile": "fused"}, {"vocab": 31}, {"head_dim": 8}):
        before = len(calls)
        set_numerics(tiny_model(**{"dtype": torch.float32} | other), "invariant", length=64)
        assert len(calls) == before + 1
    monkeypatch.setattr(invariance, "fingerprint", lambda device: {"torch": "another"})
    set_numerics(model, "invariant", length=64)
    assert len(calls) == 5


def test_a_damaged_memory_is_asked_no_more(tmp_path):
    model = keep_rule(tiny_model(dtype=torch.float32), 64)
    [file] = (tmp_path / "cache" / "reprise").iterdir()
    first = model.rule
    for text in ("", "[]", json.dumps({"key": 1, "answer": {"rows": 1}})):
        file.write_text(text)
        set_numerics(model, "invariant", length=64)
        assert model.rule == first and json.loads(file.read_text())["answer"] == vars(first)


def test_an_unwritable_memory_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert keep_rule(tiny_model(dtype=torch.float32), 64).rule == find_rule(tiny_model(dtype=torch.float32), 64)


def test_a_logged_rule_is_tried_before_it_is_kept(monkeypatch):
    model = keep_rule(tiny_model(dtype=torch.float32), 64)
    wanted = dict(vars(model.rule))
    adopt_rule(model, {})
    assert model.numerics == "shapes"
    adopt_rule(model, wanted)
    assert vars(model.rule) == wanted
    monkeypatch.setattr(invariance, "attention_trials", lambda model, length: [kernel(first=True)])
    monkeypatch.setattr(invariance, "VERSION", "test")
    with pytest.raises(RuntimeError, match="under the rule of the log: scripted"):
        adopt_rule(model, wanted)
    assert model.rule is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("linear", ["native", "packed"])
def test_a_found_rule_is_not_broken(dtype, linear):
    reason = packed_unavailable(dtype, "cpu")
    if linear == "packed" and reason:
        pytest.skip(reason)
    model = keep_rule(wide_model(dtype, linear=linear), 700)
    assert broken(model, model.rule) is None


# ---- each clause, switched off, is seen ----


def trial_named(found, start):
    return next(trial for trial in found if trial.name.startswith(start))


def test_products_of_few_rows_are_seen():
    """Native float32 products have other kernels for few rows on every CPU that was met."""
    model = keep_rule(wide_model(), 64)
    if model.rule.rows == 1:
        pytest.skip("this CPU multiplies any number of rows alike")
    assert "linear" in broken(model, replace(model.rule, rows=1))


def test_products_of_many_rows_are_seen():
    """bfloat16 products of 1,024 terms: where a block is needed, none is not enough."""
    model = keep_rule(wide_model(torch.bfloat16, hidden=1024, head_dim=64), 64)
    if model.rule.row_block == trials.BLOCKS[0]:
        pytest.skip("this CPU multiplies any number of rows alike")
    assert "linear" in broken(model, replace(model.rule, row_block=1024))


def test_vector_tails_are_seen():
    """silu of float32 computes the last few elements of a tensor by another formula."""
    model = wide_model()  # 696 columns: no multiple of any vector
    swiglu = trial_named(trials.stack_trials(model), "swiglu")
    if _holds(swiglu, 1, 64):
        pytest.skip("this CPU has no other formula for tails")
    assert _holds(swiglu, 16, 64)


def test_a_product_of_one_column_is_seen(monkeypatch):
    """The exit gate is a row sum because a product of one column depends on the row's index."""
    model = wide_model()
    gate = trial_named(trials.free_trials(model), "exit gate")
    assert _holds(gate, 1, 256)
    weight = model.wide["exit_gate.weight"]
    product = Trial("product", gate.rows, lambda x: F.linear(x, weight))
    if _holds(product, 1, 256):
        pytest.skip("this CPU multiplies one column alike at every place")


def test_unpadded_rows_must_agree_in_any_number(monkeypatch):
    """Log-softmax, gate and sigmoid take read-out rows as they come; a plain sigmoid has a tail."""
    model = keep_rule(wide_model(), 64)
    values = trial_named(trials.free_trials(model), "exit probability").rows
    if not _holds(Trial("sigmoid", values, torch.sigmoid), 1, 256):
        monkeypatch.setattr(trials, "exit_probability", torch.sigmoid)
        assert broken(model, model.rule).startswith("exit probability [N]: rows differ")
    monkeypatch.setattr(invariance, "free_trials", lambda model: [kernel(least=2)])
    assert find_rule(model, 64) == broken(model, model.rule) == (
        "scripted: rows differ by their company in blocks of 256 rows, padded to 1")


def test_few_queries_are_seen():
    model = keep_rule(wide_model(), 512)
    if model.rule.queries == 1:
        pytest.skip("this CPU attends from any number of queries alike")
    assert broken(model, replace(model.rule, queries=1)).startswith("attention sdpa over")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_data_of_the_trials_cancel(dtype):
    """A bfloat16 sum that does not cancel hides in what order it was added: the results must be rounding
    errors, not zeros and not ordinary values."""
    model = wide_model(dtype)
    product = trial_named(trials.stack_trials(model), "linear q")
    found = product.run(product.rows[:64]).float().abs()
    assert 0 < found.mean() < 1e-4 and (found > 0).float().mean() > 0.3
    for trial in trials.attention_trials(model, 600):
        found = trial.run(trial.rows).float().abs()
        assert 0 < found.mean() < 1e-2 and (found > 0).float().mean() > 0.1, trial.name
