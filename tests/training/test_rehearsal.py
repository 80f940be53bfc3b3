"""A rehearsal keeps what makes a lineage: depth, experts, picks, growth, ZeRO, the shape of its schedules."""

from pathlib import Path

import pytest

from growth.grown_config import grown_configs
from lightninglm.planning.memory import tensor_bytes
from lightninglm.planning.stages import load_stages
from lightninglm.recipe import RecipeError, load_lineage
from lightninglm.training.rehearsal import STEPS, write_rehearsal
from lightninglm.training.schedule import learning_rate_factor

RECIPES = Path(__file__).parents[2] / "recipes"
KEPT = (
    *("num_hidden_layers", "layer_types", "num_streams", "num_experts", "num_experts_per_tok", "num_null_experts"),
    *("router_layout", "router_scoring", "num_expert_groups", "groups_per_token", "members_per_group"),
    *("balance", "balance_speed", "balance_band", "stack", "step_sizes", "blends", "mode", "rope_enabled"),
    *("num_nextn_predict_layers", "mtp_stack", "mtp_num_experts", "mtp_num_experts_per_tok"),
)


@pytest.fixture(scope="module", params=["paper", "preserving"])
def both(request, tmp_path_factory):
    """(real stages, rehearsed stages) of a big lineage, for 8 ranks."""
    folder = tmp_path_factory.mktemp(request.param)
    write_rehearsal(load_lineage(RECIPES / request.param), 64, 8, folder)
    return load_stages(RECIPES / request.param, grown_configs)[0], load_stages(folder / "recipes", grown_configs)[0]


def test_models_differ_in_their_widths_only(both):
    for real, rehearsed in zip(*both, strict=True):
        for key in KEPT:
            assert getattr(rehearsed.config, key) == getattr(real.config, key), (real.recipe.name, key)
        assert rehearsed.config.hidden_size == 64 and rehearsed.config.moe_intermediate_size == 16
        tensors = [tensor_bytes(stage.config, "fp32") for stage in (real, rehearsed)]  # built on the meta device
        trained = [{tensor.name for tensor in built if tensor.trained} for built in tensors]
        assert trained[0] == trained[1]
        kinds = [(stage.config.expert_quantization or {}).get("kind") for stage in (real, rehearsed)]
        assert kinds[0] == kinds[1]


def test_stages_differ_in_their_length_only(both):
    for real, rehearsed in zip(*both, strict=True):
        before, after = real.recipe, rehearsed.recipe
        assert after.name == before.name and after.total_steps == STEPS and after.train.dtype == "fp32"
        assert after.deepspeed_file.resolve() == before.deepspeed_file.resolve()
        assert after.train.expert_parallel == before.train.expert_parallel
        assert after.optimizer == before.optimizer and after.data.sequence_length == before.data.sequence_length // 64
        assert sorted(after.data.mixture.values()) == sorted(before.data.mixture.values())
        accumulates = [r.train.global_batch > r.train.micro_batch * 8 for r in (before, after)]
        assert accumulates[0] == accumulates[1]
        if before.grow is not None:
            assert (after.grow.source, after.grow.moments) == (before.grow.source, before.grow.moments)
            grown = [
                [(name, options.get("strategy")) for step in recipe.grow.steps for name, options in step.items()]
                for recipe in (before, after)
            ]
            assert grown[0] == grown[1]


def test_schedules_keep_their_shape(both):
    for real, rehearsed in zip(*both, strict=True):
        before, after = real.recipe.schedule_in_steps, rehearsed.recipe.schedule_in_steps
        assert (after.kind, after.warmup_from) == (before.kind, before.warmup_from)
        assert (after.warmup_steps > 0) == (before.warmup_steps > 0) and after.warmup_steps < STEPS
        ends = [
            learning_rate_factor(stage.recipe.total_steps - 1, stage.recipe.total_steps, schedule)
            for stage, schedule in ((real, before), (rehearsed, after))
        ]
        assert ends[0] == pytest.approx(ends[1])
        share = [s.warmup_steps / stage.recipe.total_steps for stage, s in ((real, before), (rehearsed, after))]
        assert abs(share[0] - share[1]) <= 1 / STEPS


def test_fewer_ranks_share_the_experts_as_they_can(tmp_path):
    rehearsal = write_rehearsal(load_lineage(RECIPES / "preserving"), 64, 2, tmp_path)
    assert rehearsal.world_size == 2
    assert {recipe.train.expert_parallel for recipe in rehearsal.recipes} == {1, 2}


def test_a_number_that_does_not_divide_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"--rehearse 48: does not divide .* these do: 2, 4, 8, 16, 32, 64, 128"):
        write_rehearsal(load_lineage(RECIPES / "preserving"), 48, 8, tmp_path)
    assert not list(tmp_path.iterdir())


def test_it_goes_on_in_its_own_folder_and_never_writes_into_that_of_another_run(tmp_path):
    real = load_lineage(RECIPES / "preserving")
    (tmp_path / "real" / real.recipes[0].name).mkdir(parents=True)
    with pytest.raises(RecipeError, match=r"real: holds a run, not a rehearsal \(its stage 'seed-2b' has begun\)"):
        write_rehearsal(real, 64, 8, tmp_path / "real")
    assert not (tmp_path / "real/recipes").exists()

    run = tmp_path / "rehearsal"
    write_rehearsal(real, 64, 8, run)
    write_rehearsal(real, 32, 8, run)  # nothing has begun
    (run / real.recipes[0].name).mkdir()
    before = {path: path.read_text() for path in (run / "recipes").iterdir()}
    write_rehearsal(real, 32, 8, run)
    for lineage, n, ranks in ((real, 64, 8), (real, 32, 2), (load_lineage(RECIPES / "paper"), 32, 8)):
        with pytest.raises(RecipeError, match="holds a rehearsal of other recipes, another N or other ranks"):
            write_rehearsal(lineage, n, ranks, run)
    assert {path: path.read_text() for path in (run / "recipes").iterdir()} == before
