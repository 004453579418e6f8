"""Model folders: what is read, what is refused by name, and that a save brings back every bit."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import GOLDEN, tiny_config, tiny_model, tokens

from models.checkpoint import INDEX, SINGLE, check_tensors, load_model, read_config, save_model
from models.dense import dense_forward, pack
from models.ouro import tensor_names


def folder_of(path, model=None):
    save_model(model or tiny_model(dtype=torch.float32), path)
    return path


def same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def edit_config(folder, **changes):
    source = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(source | changes))


def edit_tensors(folder, change, metadata=None):
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata=metadata)


def shard(folder, count=3):
    """Split the single file into shards with an index, tensors dealt round."""
    tensors, mapping = load_file(folder / SINGLE), {}
    for i in range(count):
        name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::count]}
        save_file(part, folder / name)
        mapping |= dict.fromkeys(part, name)
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": mapping}))
    return mapping


# ---- what is read ----


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_saved_model_loads_with_the_same_bits(tmp_path, dtype, tied):
    model = tiny_model(dtype=getattr(torch, dtype), tied=tied)
    folder = folder_of(tmp_path / "m", model)
    loaded = load_model(folder, dtype=dtype)
    same_bits(loaded.weights, model.weights)
    assert loaded.config == model.config and loaded.digest() == model.digest()
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == dtype
    assert [p.name for p in tmp_path.iterdir()] == ["m"], "nothing temporary is left"


def test_the_published_layout_is_written(tmp_path):
    """The official names, a format entry for loaders that insist on one, the config as it was read."""
    golden = load_model(GOLDEN / "ouro-tiny-a")
    save_model(golden, tmp_path / "m")
    same_bits(load_file(tmp_path / "m" / SINGLE), load_file(GOLDEN / "ouro-tiny-a" / SINGLE))
    with safe_open(tmp_path / "m" / SINGLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    config, source = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "m", GOLDEN / "ouro-tiny-a"))
    assert config == source


def test_a_bfloat16_file_without_metadata_loads_as_published(tmp_path):
    """The published files are bf16 and carry no __metadata__."""
    folder = folder_of(tmp_path / "m", tiny_model(dtype=torch.bfloat16))
    edit_tensors(folder, lambda tensors: None, metadata=None)
    with safe_open(folder / SINGLE, framework="pt") as file:
        assert file.metadata() is None
    same_bits(load_model(folder, dtype="bfloat16").weights, tiny_model(dtype=torch.bfloat16).weights)
    same_bits(load_model(folder).weights, tiny_model(dtype=torch.float32).weights)  # widening is exact


def test_loading_narrower_is_one_rounding(tmp_path):
    model = tiny_model(dtype=torch.float32)
    for weight in model.weights.values():
        weight.mul_(1.001)
    folder = folder_of(tmp_path / "m", model)
    same_bits(load_model(folder, dtype="bfloat16").weights,
              {name: w.bfloat16() for name, w in model.weights.items()})


@pytest.mark.parametrize("dtype, profile", [("float32", "hf"), ("bfloat16", "hf"), ("bfloat16", "fused")])
def test_a_sharded_checkpoint_is_the_same_model(tmp_path, dtype, profile):
    folder = folder_of(tmp_path / "m")
    single = load_model(folder, dtype=dtype, profile=profile)
    shard(folder)
    loaded = load_model(folder, dtype=dtype, profile=profile)
    same_bits(loaded.weights, single.weights)
    assert loaded.profile == profile and loaded.digest() == single.digest()


def crafted(tensors, path):
    """A valid safetensors file whose data starts 4 bytes behind a 16-byte boundary."""
    header, blobs, at = {}, [], 0
    for name, tensor in tensors.items():
        blob = tensor.numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    text += b" " * ((4 - 8 - len(text)) % 16)
    assert (8 + len(text)) % 16 == 4
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def test_weights_off_a_16_byte_boundary_in_the_file_get_aligned_storage(tmp_path):
    """A view of a mapped file keeps the file's offset, and alignment decides bits."""
    folder = folder_of(tmp_path / "m")
    right = load_model(folder)
    crafted(load_file(folder / SINGLE), folder / SINGLE)
    loaded = load_model(folder)
    same_bits(loaded.weights, right.weights)
    storages = set()
    for name, weight in loaded.weights.items():
        assert weight.data_ptr() % 16 == 0 and weight.is_contiguous(), name
        storages.add(weight.untyped_storage().data_ptr())
    assert len(storages) == len(loaded.weights), "each weight owns its storage"
    for a, b in zip(*(dense_forward(m, pack([tokens(9)], m), 3) for m in (right, loaded)), strict=True):
        assert torch.equal(a, b)


def test_the_file_may_go_away_after_loading(tmp_path):
    folder = folder_of(tmp_path / "m")
    loaded = load_model(folder)
    before = loaded.digest()
    (folder / SINGLE).write_bytes(b"\0" * (folder / SINGLE).stat().st_size)
    assert loaded.digest() == before


# ---- what is refused ----


def drop(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add(tensors):
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(24, 16)


def reshape(tensors):
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(24, 16)


def quantise(tensors):
    tensors["model.norm.weight"] = torch.ones(16, dtype=torch.int8)


def buffer(tensors):
    tensors["model.rotary_emb.inv_freq"] = torch.ones(3)


@pytest.mark.parametrize("change, message", [
    (drop, r"missing tensor 'model\.layers\.1\.mlp\.up_proj\.weight' \(1 in all\)"),
    (add, r"unexpected tensor 'model\.layers\.2\.mlp\.up_proj\.weight' \(1 in all\)"),
    (buffer, r"unexpected tensor 'model\.rotary_emb\.inv_freq'"),
    (reshape, r"'model\.layers\.0\.self_attn\.k_proj\.weight' has shape \(24, 16\), the config says \(12, 16\)"),
    (quantise, r"'model\.norm\.weight' has dtype I8; quantised or integer"),
])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_wrong_tensor_is_named(tmp_path, change, message, sharded):
    folder = folder_of(tmp_path / "m")
    edit_tensors(folder, change)
    if sharded:
        shard(folder)
    with pytest.raises(ValueError, match=message):
        load_model(folder)
    with pytest.raises(ValueError, match=message):
        check_tensors(folder, read_config(folder))


def test_a_head_beside_a_tied_config_is_refused(tmp_path):
    folder = folder_of(tmp_path / "m")
    edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"'lm_head\.weight' stands beside tie_word_embeddings = true"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -5000])
def test_a_truncated_file_is_refused(tmp_path, keep):
    folder = folder_of(tmp_path / "m")
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(whole[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        load_model(folder)


def test_a_truncated_shard_is_refused(tmp_path):
    folder = folder_of(tmp_path / "m")
    shard(folder)
    last = folder / "model-00003-of-00003.safetensors"
    last.write_bytes(last.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"model-00003-of-00003\.safetensors is not a whole safetensors"):
        load_model(folder)


def test_an_absent_shard_or_file_is_named(tmp_path):
    folder = folder_of(tmp_path / "m")
    shutil.copytree(folder, tmp_path / "n")
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.safetensors is missing"):
        load_model(folder)
    (tmp_path / "n" / SINGLE).unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        load_model(tmp_path / "n")


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path):
    folder = folder_of(tmp_path / "m")
    mapping = shard(folder)
    index, first = folder / INDEX, "model-00001-of-00003.safetensors"

    def refused(weight_map, message):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=message):
            load_model(folder)

    moved = next(name for name, file in mapping.items() if file != first)
    refused(mapping | {moved: first}, rf"tensor '{moved}' is not in {first}")
    refused({k: v for k, v in mapping.items() if k != moved}, rf"tensor '{moved}' stands in a shard but not in")
    refused(mapping | {moved: "../other.safetensors"}, "weight_map must be an object")
    refused(mapping | {moved: 3}, "weight_map must be an object")
    refused(None, "weight_map must be an object")
    index.write_text(json.dumps({"weight_map": mapping}))
    load_model(folder)
    save_file(load_file(folder / first) | {moved: torch.zeros(3)}, folder / first)
    with pytest.raises(ValueError, match=rf"tensor '{moved}' stands in {first} and in {mapping[moved]}"):
        load_model(folder)


def test_a_single_file_beside_an_index_is_refused(tmp_path):
    """Tools differ in which of the two they read; a left-over file would be another model."""
    folder = folder_of(tmp_path / "m")
    shutil.copy(folder / SINGLE, tmp_path / SINGLE)
    shard(folder)
    shutil.copy(tmp_path / SINGLE, folder / SINGLE)
    with pytest.raises(ValueError, match=r"holds model\.safetensors and model\.safetensors\.index\.json"):
        load_model(folder)


@pytest.mark.parametrize("text, message", [
    (None, r"config\.json is missing"), ("{", r"config\.json is not valid JSON"),
    ("[1]", r"config\.json must hold a JSON object"), ("{}", r"model_type = None")])
def test_a_folder_without_a_usable_config_is_refused(tmp_path, text, message):
    folder = folder_of(tmp_path / "m")
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_an_absent_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"model = '.*/none' is not a folder; give one that holds config\.json"):
        load_model(tmp_path / "none")


@pytest.mark.parametrize("dtype", ["float16", "fp16", "half"])
def test_float16_is_refused_by_name(tmp_path, dtype):
    with pytest.raises(ValueError, match=rf"dtype = '{dtype}': float16 is not supported"):
        load_model(folder_of(tmp_path / "m"), dtype=dtype)


def test_an_unknown_dtype_or_profile_is_refused(tmp_path):
    folder = folder_of(tmp_path / "m")
    with pytest.raises(ValueError, match=r"dtype = 'int8' is unknown"):
        load_model(folder, dtype="int8")
    with pytest.raises(ValueError, match=r"profile = 'vllm' is unknown"):
        load_model(folder, profile="vllm")


# ---- what is written ----

CARRIED = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja",
           "generation_config.json", "special_tokens_map.json", "added_tokens.json", "modeling_ouro.py",
           "configuration_ouro.py")


def test_companions_are_carried_along_and_nothing_else(tmp_path):
    source = folder_of(tmp_path / "source")
    for name in CARRIED:
        (source / name).write_bytes(name.encode())
        (source / name).chmod(0o444)
    for name in ("optimizer.pt", "README.md", "pytorch_model.bin"):
        (source / name).write_text("x")
    save_model(load_model(source), tmp_path / "copy", source=source)
    assert {p.name for p in (tmp_path / "copy").iterdir()} == {"config.json", SINGLE, *CARRIED}
    for name in CARRIED:
        assert (tmp_path / "copy" / name).read_bytes() == name.encode()
        assert (tmp_path / "copy" / name).stat().st_mode & 0o200, "a copy may be edited"


def test_masters_are_written_in_their_own_dtype(tmp_path):
    """Views into one flat vector, as a learner holds them, beside a bfloat16 compute copy."""
    model = tiny_model(dtype=torch.bfloat16)
    flat = torch.randn(sum(w.numel() for w in model.weights.values()), generator=torch.Generator().manual_seed(0))
    masters, at = {}, 0
    for name, weight in model.weights.items():
        masters[name] = flat[at:at + weight.numel()].view(weight.shape).requires_grad_()
        at += weight.numel()
    save_model(model, tmp_path / "m", weights=masters)
    same_bits(load_model(tmp_path / "m").weights, {name: w.detach() for name, w in masters.items()})
    assert json.loads((tmp_path / "m" / "config.json").read_text())["torch_dtype"] == "float32"


def test_a_config_changed_or_made_by_hand_is_written_as_it_is(tmp_path):
    """Not as it was once read: the folder must load as the model that was saved."""
    save_model(tiny_model(loops=2), tmp_path / "changed")
    assert read_config(tmp_path / "changed") == tiny_config(loops=2)
    bare = tiny_config(source={}, eos_ids=(1, 2), bos_id=None, pad_id=4, exit_threshold=0.5)
    model = tiny_model(source={}, eos_ids=(1, 2), bos_id=None, pad_id=4, exit_threshold=0.5)
    save_model(model, tmp_path / "bare")
    assert load_model(tmp_path / "bare", dtype="float64").config == bare


def test_a_used_folder_is_not_written_into(tmp_path):
    folder = folder_of(tmp_path / "m")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(ValueError, match=r"it exists and is not empty; name a new folder"):
        save_model(tiny_model(seed=1), folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="exists and is not empty"):
        save_model(tiny_model(), tmp_path / "file")


def test_an_empty_or_nested_folder_is_written(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    folder_of(tmp_path / "empty")
    load_model(tmp_path / "empty")
    monkeypatch.chdir(tmp_path)
    folder_of("a/b/c")
    load_model(tmp_path / "a" / "b" / "c")


def test_a_failed_save_leaves_no_folder_and_the_next_one_succeeds(tmp_path, monkeypatch):
    model = tiny_model(dtype=torch.float32)

    def broken(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("models.checkpoint.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        save_model(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    monkeypatch.undo()
    save_model(model, tmp_path / "m")
    assert load_model(tmp_path / "m").digest() == model.digest()


def test_faulty_requests_to_save_are_refused(tmp_path):
    model = tiny_model()
    with pytest.raises(ValueError, match=r"source = '.*none' is not a folder"):
        save_model(model, tmp_path / "m", source=tmp_path / "none")
    with pytest.raises(RuntimeError, match=r"tensor 'head' is missing"):
        save_model(model, tmp_path / "m", weights={n: w for n, w in model.weights.items() if n != "head"})
    assert not list(tmp_path.iterdir())


def test_every_weight_has_an_official_name(tmp_path):
    names = tensor_names(tiny_config(layers=3))
    assert len(set(names.values())) == 11 * 3 + 5
    assert len(tensor_names(tiny_config(layers=3, tied=True))) == 11 * 3 + 4
