"""The planned operations are those that torch counts while the model trains."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM
from lightninglm.planning.compute import training_flops
from tests.planning.test_activations import INT8, MOE, small_config


def _product(self_shape, a_shape, b_shape, out_shape=None, **kwargs):
    return 2 * math.prod(a_shape) * b_shape[-1]


IN_PLACE = {torch.ops.aten.addmm_: _product, torch.ops.aten.baddbmm_: _product}  # torch does not know them


@pytest.mark.parametrize(
    ("changes", "length"),
    [({}, 256), (MOE, 256), (INT8, 256), ({"stack": "sequential"}, 256), ({}, 1280)],
    ids=["dense", "moe", "int8", "sequential", "long"],
)
def test_flops_are_those_that_torch_counts(changes, length):
    config = small_config(num_nextn_predict_layers=1, max_position_embeddings=2048, **changes)
    torch.manual_seed(0)
    model = LightningLMForCausalLM(config).train()
    model.set_token_bytes([bytes([i % 256, i // 256]) for i in range(config.vocab_size)])
    ids = torch.randint(0, config.vocab_size, (1, length))
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        model(ids, labels=ids).loss.backward()
    planned = training_flops(config, length)
    counted = counter.get_total_flops() / length
    assert counted <= planned.hardware <= 1.05 * counted  # torch counts neither the convolutions nor Sinkhorn
    assert planned.forward < planned.model < planned.hardware
