import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from train import checkpoint
from train.checkpoint import MANIFEST, latest, load, rewind, save, verify


def export(path):
    (path / "extra").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "extra" / "chat_template.jinja").write_text("{{ x }}")


def write(folder, step, keep=3, **options):
    tensors = {"master": torch.full((5,), float(step)), "updates": torch.tensor(step)}
    return save(folder, step, tensors, {"step": step, "rate": 0.1 + 0.2}, options.get("export", export), keep)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def found(folder):
    """Newest sound checkpoint and what was said about others."""
    said = []
    return latest(folder, said.append), said


def reseal(path):
    """Recompute the manifest, as someone would who edits a checkpoint on purpose."""
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"] = {name: checkpoint._entry(file) for name, file in checkpoint._files(path).items()}
    (path / MANIFEST).write_text(json.dumps(manifest))


def test_what_was_saved_comes_back(tmp_path):
    bf16 = torch.randn(3, 4).bfloat16()
    tensors = {"a": torch.tensor([-0.0, float("nan"), 1e-45]), "b": bf16, "count": torch.tensor(2**40), "t": bf16.T}
    state = {"cursor": [3, 7], "rate": 0.1 + 0.2, "name": "é", "none": None}
    path = save(tmp_path / "new" / "folder", 12, tensors, state, export, 1)
    assert path == tmp_path / "new" / "folder" / "step-000012"
    again = load(path)
    assert (again.step, again.state, again.path) == (12, state, path)
    assert set(again.tensors) == set(tensors)
    assert torch.equal(again.tensors["a"].view(torch.int32), tensors["a"].view(torch.int32))
    for name in ("b", "count", "t"):
        assert torch.equal(again.tensors[name], tensors[name]) and again.tensors[name].dtype == tensors[name].dtype
    assert all(tensor.data_ptr() % 16 == 0 for tensor in again.tensors.values())
    assert (path / "model" / "extra" / "chat_template.jinja").read_text() == "{{ x }}"


def test_loaded_tensors_are_aligned_and_independent(tmp_path):
    """A mapped file puts tensors at the byte where the header ends."""
    tensors = {f"t{index}": torch.randn(3) for index in range(7)}
    loaded = load(save(tmp_path, 1, tensors, {}, export, 1)).tensors
    assert all(tensor.data_ptr() % 16 == 0 for tensor in loaded.values())
    loaded["t0"].zero_()
    assert torch.equal(loaded["t1"], tensors["t1"])


def test_the_newest_k_are_kept(tmp_path):
    for step in (2, 10, 1000000, 30):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-000010", "step-000030", "step-1000000"]
    assert found(tmp_path) == (tmp_path / "step-1000000", [])


def test_keep_one(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step, keep=1)
        assert names(tmp_path) == [f"step-{step:06d}"]


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (999999, 1000000):
        write(tmp_path, step, keep=1)
    assert names(tmp_path) == ["step-1000000"]


def test_older_ones_live_until_the_new_one_is_complete(tmp_path, monkeypatch):
    write(tmp_path, 1, keep=1)
    seen = []
    prune = checkpoint._prune

    def watch(folder, step, keep):
        seen.append((load(folder / "step-000001").step, load(folder / "step-000002").step))
        prune(folder, step, keep)

    monkeypatch.setattr(checkpoint, "_prune", watch)
    write(tmp_path, 2, keep=1)
    assert seen == [(1, 2)]


def test_a_damaged_one_is_not_counted_among_the_kept(tmp_path):
    """With keep = 2 a damaged predecessor would otherwise leave a single sound checkpoint."""
    write(tmp_path, 1)
    os.truncate(write(tmp_path, 2) / "tensors.safetensors", 3)
    write(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003"]


def test_no_folder_or_an_empty_one_holds_no_checkpoint(tmp_path):
    assert found(tmp_path) == (None, []) and found(tmp_path / "absent") == (None, [])
    with pytest.raises(ValueError, match=r"run\.resume.*absent"):
        load(tmp_path / "absent")


FILES = ["tensors.safetensors", "state.json", "model/config.json", "model/extra/chat_template.jinja"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "remove"])
def test_damage_names_the_file_and_is_passed_over(tmp_path, name, damage):
    write(tmp_path, 1)
    file = write(tmp_path, 2) / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    changed = {"flip": data, "truncate": data[:-1], "extend": data + b"\n"}.get(damage)
    file.unlink() if changed is None else file.write_bytes(changed)
    with pytest.raises(RuntimeError, match=rf"step-000002: {name} is (damaged|missing)"):
        load(tmp_path / "step-000002")
    path, said = found(tmp_path)
    assert path == tmp_path / "step-000001" and len(said) == 1 and "step-000002" in said[0] and name in said[0]


def test_an_extra_file_is_named(tmp_path):
    (write(tmp_path, 1) / "model" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"model/pytorch_model\.bin is not in its manifest"):
        verify(tmp_path / "step-000001")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda m: m.pop("files"), "damaged"),
        (lambda m: m.update(format=2), "format 2 is not known"),
        (lambda m: m.update(step=3), "is of step 3"),
        (lambda m: m.update(step="1"), "damaged"),
        (lambda m: m.update(note=""), "damaged"),
        (lambda m: m["files"].pop("state.json"), r"names no tensors\.safetensors or no state\.json"),
        (lambda m: m["files"].pop("model/config.json"), "is not in its manifest"),
        (lambda m: m["files"]["state.json"].update(sha256="0" * 64), r"state\.json is damaged"),
        (lambda m: m["files"].update(state=3), "state is missing"),
    ],
)
def test_manifests_that_do_not_fit(tmp_path, change, words):
    path = write(tmp_path, 1)
    manifest = json.loads((path / MANIFEST).read_text())
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(RuntimeError, match=words):
        load(path)
    assert found(tmp_path)[0] is None


@pytest.mark.parametrize("text", [None, "", "{", "[]", "3"])
def test_unreadable_manifests(tmp_path, text):
    path = write(tmp_path, 1)
    (path / MANIFEST).unlink() if text is None else (path / MANIFEST).write_text(text)
    with pytest.raises(RuntimeError, match=r"manifest\.json is (missing|damaged)"):
        load(path)


def test_resealed_edits_load_but_a_folder_of_another_step_does_not(tmp_path):
    """Digests detect damage, not intent; the step is checked against the name all the same."""
    path = write(tmp_path, 1)
    save_file({"master": torch.zeros(5)}, path / "tensors.safetensors")
    reseal(path)
    assert load(path).tensors["master"].tolist() == [0.0] * 5
    shutil.copytree(path, tmp_path / "step-000009")
    assert found(tmp_path)[0] == path
    path.rename(tmp_path / "best")
    assert load(tmp_path / "best").step == 1


def test_leftovers_are_named_and_removed_by_the_next_save(tmp_path):
    write(tmp_path, 1)
    for name in ("step-000002.partial", "step-000000.deleted"):
        shutil.copytree(tmp_path / "step-000001", tmp_path / name)
    (tmp_path / "notes.partial").mkdir()
    path, said = found(tmp_path)
    assert path.name == "step-000001" and len(said) == 2 and "step-000002.partial" in said[1]
    write(tmp_path, 3)
    assert names(tmp_path) == ["notes.partial", "step-000001", "step-000003"]


@pytest.mark.parametrize("place", ["save_file", "export", "_write_manifest", "_put_in_place"])
def test_a_full_disk_leaves_the_older_one(tmp_path, monkeypatch, place):
    write(tmp_path, 1, keep=1)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    if place != "export":
        monkeypatch.setattr(checkpoint, place, full)
    with pytest.raises(RuntimeError, match=r"step-000002 cannot be written.*No space left"):
        write(tmp_path, 2, keep=1, **({"export": full} if place == "export" else {}))
    assert names(tmp_path) == ["step-000001"] and load(tmp_path / "step-000001").step == 1


def test_an_error_of_the_export_passes_through_and_leaves_nothing(tmp_path):
    def broken(path):
        path.mkdir()
        raise KeyError("weights")

    with pytest.raises(KeyError):
        write(tmp_path, 2, export=broken)
    assert names(tmp_path) == []


def test_state_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        save(tmp_path, 1, {}, {"x": float("nan")}, export, 1)
    assert names(tmp_path) == []


def test_the_same_step_again_replaces_it(tmp_path):
    write(tmp_path, 1)
    os.truncate(write(tmp_path, 2) / "state.json", 0)
    write(tmp_path, 2)
    assert names(tmp_path) == ["step-000001", "step-000002"] and load(tmp_path / "step-000002").step == 2


def test_what_was_replaced_comes_second(tmp_path):
    """Both are there when a process is killed just after the new one was put in place."""
    path = write(tmp_path, 2)
    shutil.copytree(path, tmp_path / "step-000002.replaced")
    assert found(tmp_path) == (path, [])
    shutil.rmtree(path)
    assert found(tmp_path) == (tmp_path / "step-000002.replaced", [])


def test_rewind_sets_later_ones_aside_for_good(tmp_path):
    """Else a run resumed at 10 and killed at 15 would go on from the 30 of the run before."""
    for step in (10, 20, 30):
        write(tmp_path, step)
    assert [path.name for path in rewind(tmp_path, 10)] == ["step-000020.after-10", "step-000030.after-10"]
    assert found(tmp_path) == (tmp_path / "step-000010", [])
    write(tmp_path, 20)
    assert [path.name for path in rewind(tmp_path, 10)] == ["step-000020.after-10.1"]
    assert rewind(tmp_path, 10) == []
    assert load(tmp_path / "step-000030.after-10").step == 30
    write(tmp_path, 11, keep=1)
    assert len(names(tmp_path)) == 4


KILLED = """
    import os, shutil, signal, sys
    from pathlib import Path
    import torch
    from train import checkpoint

    def export(path):
        path.mkdir()
        (path / "config.json").write_text("{}")

    def save(folder, step):
        checkpoint.save(folder, step, {"x": torch.full((100,), float(step))}, {"at": step}, export, 1)

    def die_at(number):
        # Every call through which the disk changes is a point; SIGKILL comes before the call.
        left = [number]
        def wrap(owner, name):
            original = getattr(owner, name)
            def call(*arguments, **options):
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return original(*arguments, **options)
            setattr(owner, name, call)
        for owner, name in ((checkpoint, "save_file"), (os, "fsync"), (os, "rename"), (os, "mkdir"),
                            (os, "unlink"), (os, "rmdir"), (Path, "write_text"), (Path, "open")):
            wrap(owner, name)

    os.fsync = lambda descriptor: None  # a SIGKILL loses nothing that was written; power loss is not tested
    root = Path(sys.argv[1])
    number, second = 0, 2
    while second:
        folder = root / f"{number}-{second}"
        save(folder, 1)
        child = os.fork()
        if child == 0:
            die_at(number)
            save(folder, second)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        path = checkpoint.latest(folder, lambda message: None)
        loaded = checkpoint.load(path)
        assert loaded.step == loaded.state["at"] in (1, second), (number, path)
        assert loaded.tensors["x"].tolist() == [float(loaded.step)] * 100, number
        if status == 0:
            assert loaded.step == second
            print(number)
            number, second = 0, second - 1
            continue
        for entry in checkpoint._entries(folder, ""):
            checkpoint.verify(entry)  # nothing half-deleted bears a checkpoint's name
        save(folder, second)
        assert checkpoint.load(folder / f"step-{second:06d}").step == second
        save(folder, 3)
        assert [p.name for p in folder.iterdir()] == ["step-000003"], (number, list(folder.iterdir()))
        number += 1
"""


def test_a_kill_at_any_point_leaves_a_sound_checkpoint(tmp_path):
    """kill -9 before each change of the disk in turn, with keep = 1; also where the same step is rewritten."""
    root = Path(checkpoint.__file__).parents[1]
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(KILLED), str(tmp_path)]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    points = [int(line) for line in result.stdout.split()]
    assert len(points) == 2 and min(points) > 15
