"""What is written is what is read, bit for bit; what cannot be written whole is not written."""

import hashlib
import json

import pytest
import torch
from checkpoints import CONFIG, STATE, tensors, write
from safetensors import safe_open

from lightninglm.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter, explain
from lightninglm.checkpoint.layout import kind_of


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_tensor_comes_back_bit_for_bit_with_its_hash(tmp_path):
    folder = write(tmp_path / "stage" / "step-00000007")
    reader = CheckpointReader(folder, verify="full")
    expected = tensors()
    assert reader.weights.keys() == {name for name in expected if kind_of(name) == "model"}
    assert reader.optimizer.keys() == {name for name in expected if kind_of(name) == "optimizer"}
    for name, tensor in expected.items():
        read, info = reader.read(name), reader.info(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape) == (info.dtype, torch.Size(info.shape))
        assert raw(read) == raw(tensor)
        assert reader.sha256(name) == hashlib.sha256(raw(tensor)).hexdigest()
    assert reader.config == CONFIG and reader.trainer_state == STATE


def test_a_part_of_a_tensor_is_read_alone(tmp_path):
    reader = CheckpointReader(write(tmp_path / "c"))
    weight = tensors()["lm_head.weight"]
    assert torch.equal(reader.read("lm_head.weight", rows=(2, 5)), weight[2:5])
    for dtype in (torch.bfloat16, torch.float32):
        target = torch.zeros(10, dtype=dtype)
        reader.read_into(target[3:8], "lm_head.weight", start=6)
        assert torch.equal(target, torch.cat((torch.zeros(3), weight.flatten()[6:11], torch.zeros(2))))
    for rows in ((8, 10), (-1, 2)):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: elements .* of 36"):
            reader.read("lm_head.weight", rows=rows)


def test_file_hashes_and_sizes_are_those_of_the_files(tmp_path):
    folder = write(tmp_path / "c")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"].keys() == {path.name for path in folder.iterdir()} - {"manifest.json"}
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        what = {"sha256": content}
        if name.endswith(".safetensors"):
            what = {"head_sha256": content[: 8 + int.from_bytes(content[:8], "little")]}
        assert entry == {"bytes": len(content)} | {key: hashlib.sha256(part).hexdigest() for key, part in what.items()}


def test_shards_of_many_blocks_and_equal_tensors_are_hashed_as_any_other(tmp_path):
    """More than one chunk per file, a tensor across the border of two, clones, and a clone that differs in one bit."""
    parent = torch.randn(1200, 1000, generator=torch.Generator().manual_seed(0))
    flipped = parent.clone()
    flipped.view(torch.int32)[600, 500] ^= 1
    expected = {"a.0": parent, "a.1": parent.clone(), "a.2": flipped, "a.3": parent.clone(), "b": torch.zeros(3).bool()}
    with CheckpointWriter(tmp_path / "c") as writer:
        for name, tensor in expected.items():
            writer.add(name, tensor)
        writer.commit(CONFIG, STATE)
    reader = CheckpointReader(tmp_path / "c", verify="full")
    for name, tensor in expected.items():
        assert raw(reader.read(name)) == raw(tensor)
        assert reader.sha256(name) == hashlib.sha256(raw(tensor)).hexdigest()


def test_shards_are_bounded_and_marked_for_huggingface(tmp_path):
    folder = write(tmp_path / "c", shard_bytes=400)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert sum(file.get_tensor(name).nbytes for name in file.keys()) <= 400  # noqa: SIM118
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}


def test_an_added_tensor_may_be_changed_afterwards(tmp_path):
    tensor = torch.ones(4)
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.add("a", tensor)
        tensor.zero_()
        writer.commit(CONFIG, STATE)
    assert torch.equal(CheckpointReader(tmp_path / "c").read("a"), torch.ones(4))


def test_tokenizer_and_extra_files_are_kept_and_verified(tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "notes.txt").write_text("not part of a tokenizer")
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.add("a", torch.ones(4))
        writer.commit(CONFIG, STATE, tokenizer_folder=tokenizer, extra_files={"growth_receipt.json": b"{}"})
    assert {"tokenizer.json", "growth_receipt.json"} <= CheckpointReader(tmp_path / "c").manifest["files"].keys()
    assert not (tmp_path / "c" / "notes.txt").exists()
    assert json.loads((tmp_path / "c" / "generation_config.json").read_text())["eos_token_id"] == 2
    assert explain(tmp_path / "c") == []


def test_a_target_that_exists_is_refused_and_untouched(tmp_path):
    folder = write(tmp_path / "c", seed=0)
    with pytest.raises(CheckpointError, match="exists already"):
        write(folder, seed=1)
    assert raw(CheckpointReader(folder, "full").read("model.norm.weight")) == raw(tensors(0)["model.norm.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_non_finite_tensor_is_refused_by_name(tmp_path, value, dtype):
    tensor = torch.zeros(100, dtype=dtype)
    tensor[50] = value
    refused = pytest.raises(CheckpointError, match=r"lm_head\.weight: 1 of 100 values are NaN or infinite")
    with refused, CheckpointWriter(tmp_path / "c") as writer:
        writer.add("lm_head.weight", tensor)
    assert list(tmp_path.iterdir()) == []


def test_a_name_added_twice_is_refused(tmp_path):
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.add("a", torch.ones(1))
        with pytest.raises(CheckpointError, match="a: added twice"):
            writer.add("a", torch.ones(1))


def test_leaving_without_commit_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "c", shard_bytes=8) as writer:
        for i in range(10):
            writer.add(f"a.{i}", torch.ones(4))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_state_that_json_cannot_express_is_refused(tmp_path):
    with CheckpointWriter(tmp_path / "c") as writer, pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        writer.commit(CONFIG, {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_two_ranks_that_add_the_same_tensor_are_refused_on_both(tmp_path):
    errors = on_two_ranks(tmp_path / "c", lambda writer: writer.add("a", torch.ones(2)))
    assert all("a: added by two ranks" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


def test_an_error_on_one_rank_is_raised_on_all_at_commit(tmp_path):
    def add(writer):
        value = float("nan") if writer.rank == 1 else 1.0
        writer.add(f"a.{writer.rank}", torch.full((2,), value))
        writer.add(f"b.{writer.rank}", torch.ones(2))

    errors = on_two_ranks(tmp_path / "c", add)
    assert all("rank 1: a.1: 2 of 2 values are NaN" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


def test_two_ranks_write_one_checkpoint(tmp_path):
    assert on_two_ranks(tmp_path / "c", lambda w: w.add(f"a.{w.rank}", torch.full((2,), float(w.rank)))) == [None, None]
    reader = CheckpointReader(tmp_path / "c", verify="full")
    assert [reader.read(f"a.{rank}").tolist() for rank in range(2)] == [[0, 0], [1, 1]]


def on_two_ranks(folder, add) -> list[CheckpointError | None]:
    """What two writers, as threads, end with."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    barrier, items = Barrier(2), [None, None]

    def run(rank):
        def all_gather(item):
            barrier.wait()
            items[rank] = item
            barrier.wait()
            return list(items)

        try:
            with CheckpointWriter(folder, rank, 2, all_gather) as writer:
                add(writer)
                writer.commit(CONFIG, STATE)
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))
