"""From 8 ranks to 4, 2, 1 and back to 8: no bit changes in a load, and the losses are those of staying on 8 ranks."""

import pytest
from ranks import run_ranks
from test_checkpointing import scramble
from tiny import INT8, tiny_config, tiny_engine, tiny_model, train_step

from lightninglm.checkpoint import CheckpointReader
from lightninglm.distributed.checkpointing import load_checkpoint, save_checkpoint

RANKS, STEPS = (8, 4, 2, 1, 8), 2
FORMS = {"fp32": None, "int8": INT8}


def engine_on(world_size, form):
    """23 experts: on 8 ranks 3 each but one with 2. 22 fraction bits and a small rate: see experts_460.py."""
    config = tiny_config(
        num_hidden_layers=2,
        layer_types=["linear_attention", "indexed_attention"],
        num_experts=23,
        num_experts_per_tok=4,
        frac_bits=22,
        expert_quantization=FORMS[form],
    )
    return tiny_engine(tiny_model(config, world_size), world_size, ep_size=world_size, lr=1e-4)


def stay(rank, world_size, folder):
    """All steps on one number of ranks, with a save after the first leg; losses by form."""
    losses = {}
    for form in FORMS:
        engine = engine_on(world_size, form)
        losses[form] = [train_step(engine, step) for step in range(STEPS)]
        save_checkpoint(engine, folder / f"{form}-0", {})
        losses[form] += [train_step(engine, step) for step in range(STEPS, STEPS * len(RANKS))]
    return losses


def go_on(rank, world_size, folder, leg):
    """Loads what the leg before saved, saves it again as it was loaded, trains, saves; losses by form."""
    losses = {}
    for form in FORMS:
        engine = engine_on(world_size, form)
        scramble(engine)
        load_checkpoint(engine, CheckpointReader(folder / f"{form}-{leg - 1}"))
        save_checkpoint(engine, folder / f"{form}-{leg}-loaded", {})
        losses[form] = [train_step(engine, step) for step in range(leg * STEPS, (leg + 1) * STEPS)]
        save_checkpoint(engine, folder / f"{form}-{leg}", {})
    return losses


def test_weights_and_moments_are_equal_after_every_load_and_the_losses_are_those_of_staying_on_8_ranks(tmp_path):
    expected = run_ranks(stay, RANKS[0], tmp_path)[0]
    found = {form: expected[form][:STEPS] for form in FORMS}
    for leg, world_size in enumerate(RANKS[1:], start=1):
        losses = run_ranks(go_on, world_size, tmp_path, leg)[0]
        for form in FORMS:
            names = f"{form}-{leg - 1}", f"{form}-{leg}-loaded"
            before, loaded = (CheckpointReader(tmp_path / name, verify="full").manifest["tensors"] for name in names)
            assert loaded == before
            found[form] += losses[form]
    for form in FORMS:
        assert found[form] == pytest.approx(expected[form], rel=1e-6)
