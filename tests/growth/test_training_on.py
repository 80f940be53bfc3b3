"""Training goes on through growth: the first step is the written rule's, and resuming anywhere changes nothing."""

import pytest
import torch
from small_checkpoints import read_all, write_tokenizer
from small_training import BETAS, EPS, LEARNING_RATE, PARTS, backward, load, train

from growth.job import parse_options, plan_growth
from lightninglm.checkpoint import CheckpointReader
from lightninglm.checkpoint.model_tensors import model_tensors

CASES = {
    "dense to MoE": ("dense", [("dense_to_moe", {"num_experts": 6})]),
    "scaled halves": ("dense", [("dense_to_moe", {"num_experts": 6, "strategy": "scaled_halves"})]),
    "deeper": ("mixture", [("deepen", {"source_layers": [0, 1, 2, 3, 0, 1]})]),
    "more experts": ("mixture", [("multiply_experts", {"num_experts": 18})]),
    "noisy clones": ("mixture", [("multiply_experts", {"num_experts": 12, "noise": 0.1})]),
    "quantized": ("quantizable", [("quantize_experts", {"rank": 4, "group_size": 32})]),
    "merged": ("quantizable", [("quantize_experts", {"rank": 4, "group_size": 32}), ("merge_experts", {})]),
    "flat router": ("mixture", [("multiply_experts", {"num_experts": 12}), ("flatten_router", {})]),
    "carried over": ("mixture", [("carry_over", {})]),
    "other tokens": ("mixture", [("resize_vocabulary", {})]),
}


def rule(kind, origin, part, old):
    """A moment of a target tensor by the table of docs/growth.md, spelled out, from the source's tensors in fp64."""
    if kind in ("zero", "initial", "derived", "zero_step_copy", "merged"):
        return torch.tensor(0.0)
    moment = old[f"{origin.sources[0]}.{part}"].double()
    if kind == "copied":
        return moment
    if kind in ("clone", "noisy_clone"):
        return moment / origin.clones ** (1 if part == "exp_avg" else 2)
    assert kind in ("slice", "scaled_slice", "rows")
    if kind == "slice":
        return origin.value(moment)  # which units: checked in test_moments.py
    if kind == "scaled_slice":
        return origin.carry(moment)
    return torch.cat((moment[:257].flip(0), (moment.mean(0, keepdim=True) if part == "exp_avg_sq" else 0 * moment[:1])))


@pytest.mark.parametrize("case", CASES)
def test_the_first_step_is_adams_with_the_moments_of_the_written_rule(case, grown, request, tmp_path):
    """For every trained tensor: w - lr m / (sqrt(v) + eps), both with the bias correction of the carried step count."""
    name, operators = CASES[case]
    source = request.getfixturevalue(name)
    for operator, options in operators:
        if operator == "resize_vocabulary":
            options = {"tokenizer": str(write_tokenizer(tmp_path / "tokens", reverse=True, more=["<|new|>"]))}
        parent, source = source, grown(source, operator, **options)
    with CheckpointReader(parent) as reader:
        plan = plan_growth(reader, operator, parse_options(operator, options), seed=3).plan
    old, new = read_all(parent), read_all(source)
    model, optimizer, state = load(source)
    backward(model, 0)
    trained = [item for item in model_tensors(model) if item.tensor.requires_grad]
    gradients = {disk: gradient for item in trained for disk, gradient in item.split(item.tensor.grad)}
    optimizer.step()
    count = CheckpointReader(parent).trainer_state["adam_step"] + 1
    moved = {n: v for item in model_tensors(model) for n, v in item.split(item.tensor.detach())}
    kinds = set()
    for tensor, gradient in gradients.items():
        origin = plan.origins[tensor]
        kinds.add(origin.kind)
        first, second = (rule(origin.kind, origin, part, old) for part in PARTS)
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient.double()
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient.double().square()
        step = (first / (1 - BETAS[0] ** count)) / ((second / (1 - BETAS[1] ** count)).sqrt() + EPS)
        expected = new[tensor].double() - LEARNING_RATE * step
        torch.testing.assert_close(moved[tensor].double(), expected, rtol=1e-6, atol=1e-6 * LEARNING_RATE * 10)
    assert kinds >= {origin.kind for n, origin in plan.origins.items() if n in gradients}
    assert state["adam_step"] == count - 1


@pytest.mark.parametrize("case", ["dense to MoE", "deeper", "more experts", "quantized"])
def test_stopping_before_or_after_growth_changes_nothing(case, grown, request, tmp_path):
    name, operators = CASES[case]
    source = request.getfixturevalue(name)

    def lineage(run, *pieces):
        """Trains in pieces of so many steps each, growing where a piece is None; every piece starts from the disk."""
        folder = source
        for i, steps in enumerate(pieces):
            if steps is None:
                for operator, options in operators:
                    folder = grown(folder, operator, **options)
            else:
                folder = train(folder, steps, tmp_path / f"{run}-{i}")
        return folder

    whole, pieces = read_all(lineage("whole", 2, None, 2)), read_all(lineage("pieces", 1, 1, None, 1, 1))
    assert whole.keys() == pieces.keys()
    for tensor in whole:
        assert torch.equal(whole[tensor], pieces[tensor]), tensor
