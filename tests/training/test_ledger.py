"""The ledger is what the ranks hold, to the byte, and what the large model needs."""

import pytest

from lightninglm.distributed.memory import measured_bytes
from lightninglm.distributed.optimizer_state import OptimizerState
from lightninglm.modeling.parameter_roles import ADAPTERS
from lightninglm.modeling.presets import preset
from lightninglm.training.ledger import BASES, EXPERTS, dispatch_line, ledger, part_of
from tests.distributed.ranks import run_ranks
from tests.distributed.tiny import INT8, tiny_config, tiny_engine, tiny_model

INT4 = INT8 | {"kind": "int4"}
ADAPTERS_120B = 2_260_992_000


def quantized_120b(kind):
    quantization = {"kind": kind, "group_size": 128, "rank": 16, "seed": 0}
    return preset("lightninglm-120b", num_nextn_predict_layers=0, expert_quantization=quantization)


@pytest.mark.parametrize("kind,weights", [("int8", 12_779_520), ("int4", 6_488_064)])
def test_the_120b_model_trains_its_experts_in_a_fiftieth_of_the_optimizer_state(kind, weights):
    planned = ledger(quantized_120b(kind), world_size=8, expert_parallel=8, dtype="bf16")
    assert planned.rows[ADAPTERS].trained == ADAPTERS_120B
    assert planned.routed_weights == 115_762_790_400
    assert planned.optimizer_saving > 45
    assert planned.expert_bytes == {"weights": weights, "adapters": 491_520, "optimizer": 2_949_120}
    padded = 20 * 58 * 8  # 460 experts on 8 ranks: four ranks have a slot without an expert
    assert planned.rows[ADAPTERS].optimizer_bytes == padded * 2_949_120
    assert planned.rows[BASES].weight_bytes == 20 * (58 * weights + 4096 + 1024)
    alone = ledger(quantized_120b(kind), dtype="bf16")
    assert alone.rows[ADAPTERS].optimizer_bytes == 12 * ADAPTERS_120B


@pytest.mark.parametrize("ranks,ep_size", [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_measured_bytes_equal_the_ledger(ranks, ep_size):
    cases = [
        (stage, dtype, quantization)
        for stage, dtype in ((0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "fp32"))
        for quantization in (None, INT8, INT4)
        if stage < 3 or ep_size == 1
    ]
    config = {id(q): tiny_config(expert_quantization=q) for q in (None, INT8, INT4)}

    def run(rank, world_size):
        measured = []
        for stage, dtype, quantization in cases:
            model = tiny_model(config[id(quantization)], ep_size)
            engine = tiny_engine(model, world_size, stage=stage, ep_size=ep_size, dtype=dtype)
            OptimizerState(engine).create(adam_step=0)
            measured.append(measured_bytes(engine, part_of))
        return measured

    for measured in run_ranks(run, ranks):
        for (stage, dtype, quantization), (weights, optimizer) in zip(cases, measured, strict=True):
            planned = ledger(
                config[id(quantization)], world_size=ranks, expert_parallel=ep_size, zero_stage=stage, dtype=dtype
            )
            assert {part: row.weight_bytes for part, row in planned.rows.items()} == weights
            assert {part: row.optimizer_bytes for part, row in planned.rows.items()} == optimizer
            assert (EXPERTS in weights) == (quantization is None)
            assert planned.compare(weights, optimizer).startswith("measured as the ledger says")


def test_a_difference_is_named():
    planned = ledger(tiny_config(expert_quantization=INT8))
    weights = {part: row.weight_bytes for part, row in planned.rows.items()}
    optimizer = {part: row.optimizer_bytes for part, row in planned.rows.items()}
    optimizer[ADAPTERS] -= 4
    text = planned.compare(weights, optimizer)
    assert f"adapters, optimizer: {optimizer[ADAPTERS]:,} where the ledger has {optimizer[ADAPTERS] + 4:,}" in text


def test_the_buffers_of_a_layers_rows_are_stated():
    """Balanced 4 T K rows, at most 3 * 8 T K + T K of them; `test_expert_parallel.py` measures both."""
    line = dispatch_line(quantized_120b("int4"), tokens=4 * 4096, expert_parallel=8, dtype="bf16")
    sent = 4 * 4096 * 12 * 4096 * 2
    assert f" {4 * sent:,} bytes on each rank when" in line
    assert f" {25 * sent:,} at most" in line
