"""Whatever happened to the files of a checkpoint, it is noticed and the file is named."""

import hashlib
import json

import pytest
import torch
from checkpoints import write

from lightninglm.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter, explain
from lightninglm.checkpoint.layout import decode_head, encode_head
from lightninglm.checkpoint.writer import encode_manifest

KINDS = (
    "config.json",
    "generation_config.json",
    "trainer_state.json",
    "model.safetensors.index.json",
    "optimizer.index.json",
    "manifest.json",
    "tokenizer.json",
    "growth_receipt.json",
    "model-00000-00001.safetensors",
    "optimizer-00000-00000.safetensors",
)


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "step-00000007")


def refusal(folder, verify) -> str:
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(folder, verify=verify)
    assert explain(folder, verify)
    return str(caught.value)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("verify", ["fast", "full"])
@pytest.mark.parametrize("cut", [1, 3])
def test_a_truncated_file_is_named(folder, name, verify, cut):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-cut])
    message = refusal(folder, verify)
    assert name in message
    if name != "manifest.json":
        assert f"found {len(content) - cut:,} bytes, expected {len(content):,} bytes" in message


@pytest.mark.parametrize("name", [name for name in KINDS if name != "manifest.json"])
def test_a_deleted_file_is_named(folder, name):
    (folder / name).unlink()
    assert f"{name}: found no such file" in refusal(folder, "fast")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("position", [0.0, 0.3, 0.7, 0.999])
def test_one_changed_byte_anywhere_is_found_by_full_verification(folder, name, position):
    content = bytearray((folder / name).read_bytes())
    content[int(position * len(content))] ^= 1
    (folder / name).write_bytes(content)
    assert name in refusal(folder, "full")


def test_not_even_white_space_of_the_manifest_can_change(folder):
    content = (folder / "manifest.json").read_bytes()
    for place in (content.index(b" "), len(content) - 1):
        (folder / "manifest.json").write_bytes(content[:place] + b"\t" + content[place + 1 :])
        assert "manifest.json: edited or damaged" in refusal(folder, "fast")


def test_two_shards_that_were_swapped_are_both_named(folder):
    first, second = (folder / f"model-00000-0000{i}.safetensors" for i in range(2))
    first.rename(folder / "other")
    second.rename(first)
    (folder / "other").rename(second)
    for verify in ("fast", "full"):
        message = refusal(folder, verify)
        assert first.name in message and second.name in message


@pytest.mark.parametrize("head", ["nested", "float offsets", "twice"])
def test_a_head_that_is_made_up_is_named(folder, head):
    path = folder / "model-00000-00001.safetensors"
    _, start = decode_head(path)
    content = path.read_bytes()
    text = content[8:start]
    made_up = {
        "nested": b"[" * len(text),
        "float offsets": text.rstrip().replace(b"[0,120]", b"[0,12e1]"),
        "twice": text.rstrip()[:-1] + b"," + text.rstrip()[1:],
    }[head]
    path.write_bytes(len(made_up).to_bytes(8, "little") + made_up + content[start:])
    assert path.name in refusal(folder, "fast")
    resize = json.loads((folder / "manifest.json").read_text())
    resize["files"][path.name]["bytes"] = path.stat().st_size
    (folder / "manifest.json").write_bytes(encode_manifest(resize))
    assert f"{path.name}: found changed bytes in its head" in refusal(folder, "fast")


@pytest.mark.parametrize("name", [name for name in KINDS if name.endswith(".json")])
def test_an_edited_small_file_is_found_by_fast_verification(folder, name):
    path = folder / name
    path.write_text(path.read_text().replace("1", "3"))
    assert name in refusal(folder, "fast")


def test_fast_verification_samples_the_values(folder):
    path = folder / "model-00000-00001.safetensors"
    content = bytearray(path.read_bytes())
    _, start = decode_head(path)
    content[start:] = bytes(len(content) - start)  # blocks that never reached the disk read as zeros
    path.write_bytes(content)
    assert path.name in refusal(folder, "fast")


def test_the_sample_is_of_tensors_that_have_bytes(tmp_path):
    folder = tmp_path / "step-00000001"
    with CheckpointWriter(folder) as writer:
        for name, size in (("a", 0), ("b", 0), ("c", 3), ("d", 4), ("e", 5)):
            writer.add(name, torch.zeros(size))
        writer.commit({}, {})
    path = folder / "model-00000-00000.safetensors"
    head, start = decode_head(path)
    for name, seen_fast in (("c", True), ("d", True), ("e", False)):
        content = bytearray(path.read_bytes())
        content[start + head[name]["data_offsets"][0]] ^= 1
        path.write_bytes(content)
        assert bool(explain(folder, "fast")) == seen_fast
        assert f"changed bytes in {name} " in str(explain(folder, "full")[0])
        content[start + head[name]["data_offsets"][0]] ^= 1
        path.write_bytes(content)


def test_an_extra_file_that_a_loader_would_read_is_named_and_other_files_are_not_our_business(folder):
    (folder / "README.md").write_text("a model card")
    assert explain(folder) == []
    (folder / "model-00000-00099.safetensors").write_bytes(b"")
    assert "model-00000-00099.safetensors: found a file that no save wrote" in refusal(folder, "fast")


def test_a_folder_without_manifest_is_not_a_complete_checkpoint(folder):
    (folder / "manifest.json").unlink()
    for verify in ("fast", "full", None):
        with pytest.raises(CheckpointError, match="not a complete checkpoint"):
            CheckpointReader(folder, verify=verify)
    assert "not a complete checkpoint" in str(explain(folder)[0])


def test_a_folder_that_is_not_there_is_said_to_be_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        CheckpointReader(tmp_path / "nothing")


def test_an_index_that_leaves_out_a_tensor_is_named(folder):
    """Even when sizes and hashes were brought in line with the edit."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][path.name] = {
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))
    assert "model.norm.weight" in refusal(folder, "fast")


def test_a_tensor_that_lies_in_two_shards_is_named(folder):
    """Even when a second shard was made for it and entered in the manifest."""
    name, path = "model.norm.weight", folder / "model-00000-00099.safetensors"
    value = CheckpointReader(folder).read(name)
    head = encode_head([(name, value)])
    path.write_bytes(head + value.numpy().tobytes())
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][path.name] = {"bytes": path.stat().st_size, "head_sha256": hashlib.sha256(head).hexdigest()}
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))
    assert f"{name}: found in model-0" in refusal(folder, "full")


def test_a_checkpoint_of_the_format_before_says_what_to_do(folder):
    manifest = json.loads((folder / "manifest.json").read_text()) | {"format": 1}
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))
    for verify in ("fast", "full", None):
        with pytest.raises(CheckpointError, match=r"format 1, but this version reads format 2 only.*train or grow"):
            CheckpointReader(folder, verify)
    assert "format 1, but this version reads format 2 only" in str(explain(folder)[0])


def test_a_shard_that_shrinks_after_verification_is_an_error_not_a_wrong_value(folder):
    reader = CheckpointReader(folder)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    path = folder / reader.weights[name].file
    reader.read(name)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=f"{path.name}: ends inside"):
        for stored, info in reader.weights.items():
            if info.file == path.name:
                reader.read(stored)


def test_several_findings_are_all_listed(folder):
    for name in ("config.json", "trainer_state.json"):
        (folder / name).unlink()
    assert {finding.file for finding in explain(folder)} == {
        str(folder / name) for name in ("config.json", "trainer_state.json")
    }


def test_an_unknown_tensor_is_an_error(folder):
    with pytest.raises(CheckpointError, match=r"holds no tensor model\.nothing"):
        CheckpointReader(folder).read("model.nothing")
    assert torch.equal(CheckpointReader(folder).read("model.memory.scale"), torch.tensor(-2.5))
