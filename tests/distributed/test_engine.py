"""Any number of ranks, any ZeRO stage and any accumulation train the same model along the same losses."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightninglm.distributed import process_group
from lightninglm.distributed.engine import build_engine, parameter_groups
from lightninglm.modeling.parameter_roles import ADAPTERS, role
from tests.distributed import tiny
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.tiny import INT8, MULTIPLIERS, tiny_config, tiny_engine, tiny_model, train, train_step

SAME_LOSS = 1e-5


@functools.cache
def one_rank(optimizer: str) -> dict[str, list]:
    """The run everything is compared with: ZeRO 0, one rank, no accumulation; every step of it is clipped."""
    run = run_ranks(functools.partial(train, stage=0, optimizer=optimizer), 1)[0]
    assert min(norm["total"] for norm in run["norm"]) > 1.0
    return run


def assert_same_run(runs: list[dict], expected: dict) -> None:
    assert runs[0]["loss"] == pytest.approx(expected["loss"], abs=SAME_LOSS)
    assert runs[0]["norm"][0] == pytest.approx(expected["norm"][0], rel=1e-6)
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize(
    ("optimizer", "world_size", "accumulation"),
    [("AdamW", ranks, micro_batches) for ranks, micro_batches in ((1, 2), (2, 1), (2, 2), (4, 1), (4, 2))]
    + [("SGD", 2, 1), ("SGD", 4, 2)],
)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_loss_does_not_depend_on_ranks_stage_or_accumulation(stage, world_size, accumulation, optimizer):
    run = functools.partial(train, stage=stage, accumulation=accumulation, optimizer=optimizer)
    assert_same_run(run_ranks(run, world_size), one_rank(optimizer))


@pytest.mark.parametrize(("world_size", "ep_size"), [(4, 2), (8, 4)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nor_on_how_often_the_experts_are_replicated(stage, world_size, ep_size):
    run = functools.partial(train, stage=stage, ep_size=ep_size, optimizer="SGD")
    assert_same_run(run_ranks(run, world_size), one_rank("SGD"))


@pytest.mark.parametrize(
    ("changes", "only_adapters"),
    [({"num_experts": 0}, False), ({}, False), ({"expert_quantization": INT8}, True)],
    ids=["dense model", "experts on every rank", "only adapters"],
)
def test_zero_3_trains_with_parameters_released_between_the_passes(changes, only_adapters, monkeypatch):
    """Limits of 0: with DeepSpeed's defaults a tiny model is never released, and nothing would be tested."""
    limits = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
    load_ds_config, make_model = tiny.load_ds_config, tiny.tiny_model

    def without_limits(*args, **kwargs):
        config = load_ds_config(*args, **kwargs)
        if config["zero_optimization"]["stage"] == 3:
            config["zero_optimization"] |= {f"stage3_{limit}": 0 for limit in limits}
        return config

    def frozen_but_for_adapters(*args):
        model = make_model(*args)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not only_adapters or role(name) == ADAPTERS)
        return model

    monkeypatch.setattr(tiny, "load_ds_config", without_limits)
    monkeypatch.setattr(tiny, "tiny_model", frozen_but_for_adapters)
    run = functools.partial(train, ep_size=1, config=tiny_config(**changes))
    expected = run_ranks(functools.partial(run, stage=0), 1)[0]
    for world_size in (1, 2):
        assert_same_run(run_ranks(functools.partial(run, stage=3), world_size), expected)


@pytest.mark.parametrize("stage", [1, 2])
def test_in_bf16_the_router_stays_in_fp32_and_the_loss_follows(stage):
    def run(rank, world_size):
        model = tiny_model(tiny_config(), world_size)
        engine = tiny_engine(model, world_size, stage=stage, ep_size=world_size, dtype="bf16")
        assert model.lm_head.weight.dtype == torch.bfloat16
        assert model.model.layers[0].mlp.router.weight.dtype == torch.float32
        before = model.model.layers[0].mlp.router.weight.detach().clone()
        losses = [train_step(engine, step) for step in range(3)]
        assert not torch.equal(before, model.model.layers[0].mlp.router.weight)
        return losses

    for world_size in (1, 2):
        for losses in run_ranks(run, world_size):
            assert losses == pytest.approx(one_rank("AdamW")["loss"][:3], abs=0.1)


def groups_of(model, **options):
    return parameter_groups(model, **{"lr": 1e-3, "weight_decay": 0.1, "multipliers": MULTIPLIERS} | options)


def test_groups_hold_every_trainable_parameter_once_with_its_role_and_rate():
    model = tiny_model(tiny_config(expert_quantization=INT8))
    frozen = model.model.norm.weight.requires_grad_(False)
    new = {"lm_head.weight", "model.layers.0.mlp.router.weight"}
    groups = groups_of(model, multipliers={"router": 1.0, "adapters": 3.0, "rest": 0.01}, new=new)
    names = {parameter: name for name, parameter in model.named_parameters()}
    listed = [parameter for group in groups for parameter in group["params"]]
    assert len({group["name"] for group in groups}) == len(groups)
    assert len(listed) == len(set(listed)) == len(names) - 1
    assert frozen not in set(listed)
    for group in groups:
        assert group["lr"] == pytest.approx({"router": 1e-3, "adapters": 3e-3, "rest": 1e-5}[group["role"]])
        for parameter in group["params"]:
            name = names[parameter]
            assert (group["role"] == "router") == (".router." in name)
            assert (group["role"] == "adapters") == name.endswith((".A", ".B"))
            assert group["new"] == (name in new)
            decayed = name.endswith((".weight", ".A", ".B")) and parameter.dim() >= 2
            assert group["weight_decay"] == (0.1 if decayed else 0.0), name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"new": ["model.layers.9.nothing"]}, r"'model\.layers\.9\.nothing' is not a trainable parameter"),
        ({"multipliers": {"rest": 1.0}}, "optimizer.groups has no learning-rate factor for 'router'"),
    ],
)
def test_groups_that_make_no_sense_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        groups_of(tiny_model(tiny_config()), **options)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_engine_trains_each_role_at_its_rate(stage):
    """The first step of Adam moves a parameter by its learning rate, sharded experts and adapters included."""
    rates = {"router": 1e-3, "adapters": 1e-2, "rest": 1e-5}
    config = tiny_config(expert_quantization=INT8)

    def run(rank, world_size):
        model = tiny_model(config, world_size)
        ds_config = tiny.load_ds_config(
            Path(tiny.__file__).parents[2] / "ds_configs" / f"zero{stage}.json",
            micro_batch=4, accumulation=1, world_size=world_size, dtype="fp32", expert_parallel=world_size,
            optimizer={"lr": 7.0, "betas": [0.9, 0.95], "eps": 1e-12, "weight_decay": 0.0}, gradient_clipping=0,
        )  # fmt: skip
        groups = groups_of(model, lr=1.0, weight_decay=0.0, multipliers=rates)
        engine = build_engine(model, ds_config, groups)
        assert {(g["role"], g["lr"]) for g in engine.optimizer.param_groups} == set(rates.items())
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        train_step(engine, 0)
        moved = {}
        for name in ("model.layers.0.mlp.router.weight", "model.layers.0.mlp.experts.up_proj.A", "lm_head.weight"):
            change = (model.get_parameter(name).detach() - before[name]).abs()
            moved[name] = change[change > 0].median().item()
        return list(moved.values())

    for medians in run_ranks(run, 2):
        assert medians == pytest.approx([rates["router"], rates["adapters"], rates["rest"]], rel=0.05)


def test_tensors_that_ranks_share_are_those_of_the_first_rank():
    def run(rank, world_size):
        model = tiny_model(tiny_config(), world_size)
        model.lm_head.weight.data += rank
        model.model.layers[0].mlp.router.logit_bias += rank
        model.model.layers[1].mixer.variance_ema += rank
        tiny_engine(model, world_size, ep_size=world_size)
        layers = model.model.layers
        shared = (model.lm_head.weight[0, 0], layers[0].mlp.router.logit_bias[0], layers[1].mixer.variance_ema)
        return [float(tensor) for tensor in shared]

    first, second = run_ranks(run, 2)
    assert first == second


def test_parameter_groups_in_another_order_on_one_rank_are_refused():
    def run(rank, world_size):
        model = tiny_model(tiny_config())
        groups = groups_of(model)
        ds_config = tiny.load_ds_config(
            Path(tiny.__file__).parents[2] / "ds_configs" / "zero0.json",
            micro_batch=4, accumulation=1, world_size=world_size, dtype="fp32", gradient_clipping=1.0,
            optimizer={"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0},
        )  # fmt: skip
        build_engine(model, ds_config, groups[::-1] if rank else groups)

    with pytest.raises(RankFailed, match="parameter groups differ between ranks"):
        run_ranks(run, 2)


@pytest.mark.launcher
def test_the_launcher_trains_as_the_forked_ranks_do(tmp_path):
    """Processes of the real launcher hash strings with different seeds, which the forked ranks of the harness share."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank"]
    script = Path(__file__).with_name("launched_training.py")
    subprocess.run(
        [*launcher, "--master_port", str(process_group.free_port()), str(script), str(tmp_path)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        check=True,
        timeout=240,
    )
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["hash"] != ranks[1]["hash"]
    assert ranks[0]["loss"] == ranks[1]["loss"] == run_ranks(train, 2)[0]["loss"]
