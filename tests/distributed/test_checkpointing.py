"""A checkpoint carries a run from any number of ranks to any other: weights, buffers, moments, counters."""

import os
import re
import subprocess
import sys

import deepspeed
import pytest
import torch
from ranks import RankFailed, run_ranks
from tiny import INT8, tiny_batch, tiny_config, tiny_engine, tiny_model, train_step
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from lightninglm.checkpoint import (
    OPTIMIZER_KEYS,
    CheckpointError,
    CheckpointReader,
    CheckpointWriter,
    newest_checkpoint,
    remove_leftovers,
    step_folder,
)
from lightninglm.checkpoint.layout import from_disk_name
from lightninglm.checkpoint.model_tensors import add_model, model_tensors
from lightninglm.distributed.checkpointing import load_checkpoint, save_checkpoint
from lightninglm.distributed.optimizer_state import MOMENTS, OptimizerState
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM

SAVED_AFTER, STEPS = 2, 4
CASES = {
    "zero0": ({"stage": 0}, None),
    "zero1-quantized": ({"stage": 1}, INT8),
    "zero2-accumulation": ({"stage": 2, "accumulation": 2}, None),
    "zero2-bf16": ({"stage": 2, "dtype": "bf16"}, None),
}


def config(quantization=None):
    """One layer of each mixer, five experts."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "indexed_attention"]}
    return tiny_config(expert_quantization=quantization, **layers)


def build(world_size, ep_size, options, quantization=None):
    return tiny_engine(tiny_model(config(quantization), ep_size), world_size, ep_size=ep_size, **options)


def scramble(engine):
    """Other weights, buffers and moments than any that a test saves, padding included."""
    state = OptimizerState(engine)
    state.create(adam_step=50)
    with torch.no_grad():
        for item in model_tensors(engine.module):
            item.tensor.fill_(1)
            for key in OPTIMIZER_KEYS if state.trains(item.tensor) else ():
                fragment = state.fragment(item.tensor, key)[1]
                if fragment is not None:
                    fragment.fill_(1)


def uninterrupted(rank, world_size, ep_size, case, folder):
    """Trains, saves in between, returns the losses after the save."""
    engine = build(world_size, ep_size, *CASES[case])
    for step in range(SAVED_AFTER):
        train_step(engine, step)
    save_checkpoint(engine, folder, {"step": SAVED_AFTER}, shard_bytes=20_000)
    return [train_step(engine, step) for step in range(SAVED_AFTER, STEPS)]


def resumed(rank, world_size, ep_size, case, source, target):
    """Loads into a scrambled engine, saves again, trains on."""
    engine = build(world_size, ep_size, *CASES[case])
    scramble(engine)
    state = load_checkpoint(engine, CheckpointReader(source))
    assert state["step"] == engine.global_steps == SAVED_AFTER
    assert engine.micro_steps == SAVED_AFTER * engine.gradient_accumulation_steps()
    save_checkpoint(engine, target, {"step": SAVED_AFTER})
    return [train_step(engine, step) for step in range(SAVED_AFTER, STEPS)]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_to_four_to_one_to_two_changes_no_bit_and_the_run_goes_on_as_if_never_stopped(case, tmp_path):
    source = tmp_path / "saved-on-2"
    losses = run_ranks(uninterrupted, 2, 2, case, source)[0]
    expected = CheckpointReader(source, verify="full").manifest["tensors"]
    for world_size, ep_size in ((4, 2), (1, 1), (2, 2)):
        target = tmp_path / f"after-{world_size}"
        continued = run_ranks(resumed, world_size, ep_size, case, source, target)[0]
        assert CheckpointReader(target, verify="full").manifest["tensors"] == expected
        if world_size == 2:
            assert continued == losses
        else:
            tolerance = 1e-2 if "bf16" in case else 1e-6
            assert continued == pytest.approx(losses, rel=tolerance)
        source = target


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two ranks with unevenly sharded quantized experts, and the logits of the model in it."""
    folder = tmp_path_factory.mktemp("run") / "step-00000002"

    def run(rank, world_size):
        engine = build(world_size, 2, {"stage": 1}, INT8)
        for step in range(2):
            train_step(engine, step)
        save_checkpoint(engine, folder, {"step": 2}, shard_bytes=20_000)
        with torch.no_grad():
            return engine.module.eval()(input_ids=tiny_batch(0)).logits

    return folder, run_ranks(run, 2)[0]


def test_everything_persistent_is_there_and_real_experts_only(saved):
    reader = CheckpointReader(saved[0])
    items = model_tensors(LightningLMForCausalLM(config(INT8)))
    assert reader.weights.keys() == {name for item in items for name in item.all_disk_names}
    assert {from_disk_name(name)[1] for name in reader.weights} == {None, 0, 1, 2, 3, 4}
    trained = {name for item in items if isinstance(item.tensor, nn.Parameter) for name in item.all_disk_names}
    assert reader.optimizer.keys() == {f"{name}.{key}" for name in trained for key in MOMENTS}
    for name in ("model.step_size", "model.blend", "model.layers.0.mlp.router.logit_bias"):
        assert name in reader.weights
    assert reader.weights["model.layers.0.mlp.experts.4.gate_proj.codes"].dtype == torch.int8


def test_each_rank_writes_its_own_experts_and_a_share_of_the_rest(saved):
    reader = CheckpointReader(saved[0])
    written, largest = {0: 0, 1: 0}, 0
    for name, info in {**reader.weights, **reader.optimizer}.items():
        writer = int(re.search(r"-(\d{5})-", info.file)[1])
        expert = from_disk_name(name)[1]
        if expert is None:
            size = torch.Size(info.shape).numel() * info.dtype.itemsize
            written[writer] += size
            largest = max(largest, 3 * size)  # a weight lies beside its two moments
        else:
            assert writer == (expert >= 3)
    assert abs(written[0] - written[1]) < largest


def test_from_pretrained_computes_what_the_engine_computed(saved):
    folder, logits = saved
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.set_token_bytes([bytes([i]) for i in range(model.config.vocab_size)])
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tiny_batch(0)).logits, logits, rtol=1e-5, atol=1e-5)
    stored = CheckpointReader(folder)
    for item in model_tensors(model):
        for name, value in item.split(item.tensor):
            assert torch.equal(stored.read(name), value)


def test_transformers_alone_reads_it_with_the_source_files_in_it(saved, tmp_path):
    """In a process that cannot import this package."""
    script = f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(saved[0])!r}, trust_remote_code=True).eval()
model.set_token_bytes([bytes([i]) for i in range(model.config.vocab_size)])
torch.save(model(input_ids=torch.load("ids.pt")).logits, "logits.pt")
"""
    torch.save(tiny_batch(0), tmp_path / "ids.pt")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), saved[1], rtol=1e-5, atol=1e-5)


def test_before_the_first_step_moments_are_zero_and_nothing_hangs(tmp_path):
    def run(rank, world_size):
        engine = build(world_size, 2, {"stage": 1})
        save_checkpoint(engine, tmp_path / "c", {"step": 0})

    run_ranks(run, 2)
    reader = CheckpointReader(tmp_path / "c")
    assert reader.trainer_state["adam_step"] == 0
    assert all(not reader.read(name).any() for name in reader.optimizer)


def test_weights_alone_start_a_fresh_optimizer(saved):
    def run(rank, world_size):
        engine = build(world_size, 1, {"stage": 2}, INT8)
        scramble(engine)
        load_checkpoint(engine, CheckpointReader(saved[0]), load_optimizer=False)
        state = OptimizerState(engine)
        moments = [state.fragment(param, key)[1] for param in engine.module.parameters() for key in MOMENTS]
        return state.adam_step, any(moment.any() for moment in moments if moment is not None)

    assert run_ranks(run, 2) == [(0.0, False)] * 2


def test_a_tensor_that_only_one_side_has_is_refused_by_name_before_anything_is_loaded(saved, tmp_path):
    original = CheckpointReader(saved[0])
    missing = ("model.norm.weight", "model.layers.1.mlp.experts.3.up_proj.A.exp_avg", "lm_head.weight.exp_avg_sq")

    def copy(folder, leave_out=(), add=(), replace=()):
        with CheckpointWriter(folder) as writer:
            for name in (*original.weights, *original.optimizer):
                if name not in (*leave_out, *dict(replace)):
                    writer.add(name, original.read(name))
            for name, value in (*add, *replace):
                writer.add(name, value)
            return writer.commit(original.config, original.trainer_state)

    bad = {
        "lacks tensors of the model: model.norm.weight": copy(tmp_path / "a", [missing[0]]),
        "has tensors that the model has not: model.old": copy(tmp_path / "b", add=[("model.old", torch.ones(1))]),
        f"lacks optimizer state of trained parameters: {missing[2]}, {missing[1]}": copy(tmp_path / "c", missing[1:]),
        "has optimizer state for parameters that are not trained: model.step_size.exp_avg": copy(
            tmp_path / "d", add=[("model.step_size.exp_avg", torch.ones(2))]
        ),
        "model.norm.weight has shape (3,), the model's is (32,)": copy(
            tmp_path / "e", replace=[("model.norm.weight", torch.ones(3))]
        ),
        "model.step_size has torch.float64, the model's is torch.float32": copy(
            tmp_path / "f", replace=[("model.step_size", torch.ones(2, dtype=torch.float64))]
        ),
    }

    def run(rank, world_size):
        engine = build(world_size, 2, {"stage": 1}, INT8)
        before = engine.module.lm_head.weight.clone()
        for message, folder in bad.items():
            with pytest.raises(CheckpointError, match=re.escape(message)):
                load_checkpoint(engine, CheckpointReader(folder))
        assert torch.equal(engine.module.lm_head.weight, before)
        load_checkpoint(engine, CheckpointReader(tmp_path / "c"), missing_moments="zero")
        state = OptimizerState(engine)
        moment = state.gather(engine.module.lm_head.weight, "exp_avg_sq", destination=0)
        return state.adam_step, None if moment is None else bool(moment.any())

    assert run_ranks(run, 2) == [(2.0, False), (2.0, None)]


def test_weights_that_are_not_their_master_copies_are_refused_on_all_ranks(tmp_path):
    def run(rank, world_size):
        engine = build(world_size, 2, {"stage": 2, "dtype": "bf16"})
        save_checkpoint(engine, tmp_path / "good", {"step": 0})
        if rank == 0:
            original = CheckpointReader(tmp_path / "good")
            with CheckpointWriter(tmp_path / "bad") as writer:
                for name in (*original.weights, *original.optimizer):
                    tensor = original.read(name)
                    writer.add(name, tensor + 1 if name == "lm_head.weight.master" else tensor)
                writer.commit(original.config, original.trainer_state)
        torch.distributed.barrier()
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: the weight is not its master copy"):
            load_checkpoint(engine, CheckpointReader(tmp_path / "bad"))

    run_ranks(run, 2)


def test_a_weight_that_is_not_finite_on_one_rank_fails_the_save_on_all_and_leaves_nothing(tmp_path):
    def run(rank, world_size):
        engine = build(world_size, 2, {"stage": 1})
        if rank == 1:
            engine.module.model.layers[1].mlp.experts.up_proj.weight.data[1, 0, 0] = float("nan")
        with pytest.raises(CheckpointError, match=r"rank 1: model\.layers\.1\.mlp\.experts\.4\.up_proj\.weight: 1 of"):
            save_checkpoint(engine, tmp_path / "c", {"step": 0})
        torch.distributed.barrier()
        engine.module.model.layers[1].mlp.experts.up_proj.weight.data.nan_to_num_()
        save_checkpoint(engine, tmp_path / "d", {"step": 0})

    run_ranks(run, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_rank_that_dies_in_a_save_leaves_the_earlier_checkpoint_the_newest(tmp_path, monkeypatch):
    def die_after_20_tensors():
        add, left = CheckpointWriter.add, iter(range(20))

        def add_or_die(*args):
            if next(left, None) is None:
                os._exit(9)
            add(*args)

        monkeypatch.setattr(CheckpointWriter, "add", add_or_die)

    def run(rank, world_size):
        engine = build(world_size, 2, {"stage": 1})
        save_checkpoint(engine, tmp_path / step_folder(1), {"step": 1})
        if rank == 1:
            die_after_20_tensors()
        save_checkpoint(engine, tmp_path / step_folder(2), {"step": 2}, shard_bytes=1000)

    with pytest.raises(RankFailed):
        run_ranks(run, 2)
    assert newest_checkpoint(tmp_path, verify="full") == (tmp_path / step_folder(1), [])
    remove_leftovers(tmp_path)  # there are none if rank 0 lived long enough to notice
    assert [path.name for path in tmp_path.iterdir()] == [step_folder(1)]


class Toy(nn.Module):
    """Odd sizes, a frozen weight and a buffer, for ZeRO-3."""

    def __init__(self):
        super().__init__()
        self.config = PreTrainedConfig()
        self.first, self.second = nn.Linear(15, 7), nn.Linear(7, 1)
        self.frozen = nn.Parameter(torch.rand(7), requires_grad=False)
        self.register_buffer("offset", torch.rand(3))

    def forward(self, x):
        return self.second(self.first(x) * self.frozen).square().mean()


def zero3_engine(world_size, bf16, seed):
    torch.manual_seed(seed)
    model = Toy()
    config = {
        "train_micro_batch_size_per_gpu": 8 // world_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 5},
        "bf16": {"enabled": bf16},
    }
    trained = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def zero3_step(engine, rank, world_size):
    x = torch.randn(8, 15, generator=torch.Generator().manual_seed(engine.global_steps)).chunk(world_size)[rank]
    loss = engine(x.bfloat16() if engine.bfloat16_enabled() else x)
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.mark.parametrize("bf16", [False, True])
def test_zero3_is_saved_and_loaded_too(tmp_path, bf16):
    def train(rank, world_size):
        engine = zero3_engine(world_size, bf16, seed=0)
        zero3_step(engine, rank, world_size)
        save_checkpoint(engine, tmp_path / "a", {})
        return zero3_step(engine, rank, world_size)

    def resume(rank, world_size, source, target):
        engine = zero3_engine(world_size, bf16, seed=1)
        load_checkpoint(engine, CheckpointReader(source))
        save_checkpoint(engine, target, {})
        return zero3_step(engine, rank, world_size)

    losses = run_ranks(train, 2)
    run_ranks(resume, 1, tmp_path / "a", tmp_path / "b")
    assert run_ranks(resume, 2, tmp_path / "b", tmp_path / "c") == losses
    saved = [CheckpointReader(tmp_path / name, verify="full").manifest["tensors"] for name in "abc"]
    assert saved[0] == saved[1] == saved[2]


def test_a_save_between_micro_batches_is_refused(tmp_path):
    def run(rank, world_size):
        engine = build(world_size, 1, {"stage": 1, "accumulation": 2})
        engine.backward(engine(input_ids=tiny_batch(0), labels=tiny_batch(0)).loss)
        engine.step()
        save_checkpoint(engine, tmp_path / "c", {"step": 0})

    with pytest.raises(RankFailed, match="not saved inside a step"):
        run_ranks(run, 1)


def test_a_model_of_one_process_is_saved_without_deepspeed(tmp_path):
    model = LightningLMForCausalLM(config())
    with CheckpointWriter(tmp_path / "c") as writer:
        add_model(writer, model)
        writer.commit(model.config.to_dict(), {"step": 0})
    reader = CheckpointReader(tmp_path / "c", verify="full")
    assert not reader.optimizer
    assert all(torch.equal(reader.read(n), v) for item in model_tensors(model) for n, v in item.split(item.tensor))

    def run(rank, world_size):
        engine = build(world_size, 2, {"stage": 1})
        load_checkpoint(engine, CheckpointReader(tmp_path / "c"), missing_moments="zero")
        save_checkpoint(engine, tmp_path / "d", {"step": 0})

    run_ranks(run, 2)
    assert {n: reader.sha256(n) for n in reader.weights} == {
        n: info.sha256 for n, info in CheckpointReader(tmp_path / "d").weights.items()
    }
