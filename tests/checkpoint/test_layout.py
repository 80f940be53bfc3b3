"""Names of files and tensors, and the head of a shard."""

import pytest
import torch
from safetensors.torch import load_file

from lightninglm.checkpoint import from_disk_name, is_stacked, parse_step, step_folder, to_disk_name
from lightninglm.checkpoint.layout import decode_head, encode_head, kind_of


@pytest.mark.parametrize(
    ("memory", "expert", "disk"),
    [
        ("model.layers.3.mlp.experts.gate_proj.weight", 17, "model.layers.3.mlp.experts.17.gate_proj.weight"),
        ("mtp.layer.mlp.experts.down_proj.codes", 0, "mtp.layer.mlp.experts.0.down_proj.codes"),
        ("model.layers.3.mlp.experts.up_proj.A", 459, "model.layers.3.mlp.experts.459.up_proj.A"),
        ("model.layers.3.mlp.experts.hidden_signs", None, "model.layers.3.mlp.experts.hidden_signs"),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", None, "model.layers.3.mlp.shared_expert.up_proj.weight"),
        ("model.layers.0.mlp.gate_proj.weight", None, "model.layers.0.mlp.gate_proj.weight"),
    ],
)
def test_names_in_memory_and_on_disk_translate_both_ways(memory, expert, disk):
    assert is_stacked(memory) == (expert is not None)
    assert to_disk_name(memory, expert) == disk
    assert from_disk_name(disk) == (memory, expert)
    assert from_disk_name(f"{disk}.exp_avg") == (f"{memory}.exp_avg", expert)


def test_step_folders_sort_by_step():
    assert step_folder(100) == "step-00000100"
    names = ("step-00000100", "step-123456789", ".tmp-step-00000100", "grow-1-deepen")
    assert [parse_step(name) for name in names] == [100, 123456789, None, None]


def test_only_optimizer_suffixes_go_to_optimizer_files():
    assert kind_of("lm_head.weight.exp_avg_sq") == kind_of("lm_head.weight.master") == "optimizer"
    assert kind_of("lm_head.weight") == kind_of("model.layers.0.mixer.variance_ema") == "model"


def test_head_is_what_safetensors_reads(tmp_path):
    tensors = {"a": torch.arange(3.0), "b": torch.tensor(2.0, dtype=torch.bfloat16)}
    head = encode_head(tensors.items())
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors.values()))
    assert len(head) % 8 == 0
    assert all(torch.equal(load_file(path)[name], tensor) for name, tensor in tensors.items())
    assert decode_head(path)[0]["a"] == {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
