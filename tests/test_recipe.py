"""A recipe that cannot run is refused before anything starts, with its file, line, key, value and what is valid."""

import json
import shutil
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel

from lightninglm.recipe import GROWN_OVERRIDES, Recipe, RecipeError, load_lineage, load_recipe

TINY = Path(__file__).parents[1] / "recipes" / "tiny"
SEED, MOE = TINY / "1-seed.yaml", TINY / "2-moe.yaml"


def test_the_tiny_lineage_is_valid():
    lineage = load_lineage(TINY)
    assert [recipe.name for recipe in lineage.recipes] == ["seed", "moe", "deep", "experts"]
    assert lineage.world_size == 2 and lineage.name == "tiny"
    assert [file.name for file in lineage.files] == ["1-seed.yaml", "2-moe.yaml", "3-deep.yaml", "4-experts.yaml"]
    experts = [recipe.num_experts for recipe in lineage.recipes]
    assert experts[:3] == [0, 5, None] and experts[3] % lineage.world_size  # does not divide by the ranks
    assert lineage.recipes[0].build_config(eos_token_id=0).eos_token_id == 0


@pytest.mark.parametrize(
    ("file", "override", "message"),
    [
        (SEED, "train.tokns=3", "train.tokns = 3: unknown key; did you mean tokens?"),
        (SEED, "nonsense=3", "nonsense = 3: unknown key; valid: name, model, grow, data"),
        (SEED, "model.hiden_size=64", "model.hiden_size = 64: unknown key; did you mean hidden_size?"),
        (SEED, "model.hidden_size=large", "model.hidden_size = 'large': Input should be a valid integer"),
        (SEED, "model.hidden_size=100", "model.linear_num_heads * model.linear_head_dim"),
        (SEED, "model.vocab_size=7", "model.vocab_size = 7: must be that of the tokenizer of data.source, 2048"),
        (SEED, "model.max_position_embeddings=64", ": above model.max_position_embeddings = 64"),
        (SEED, "model=null", "model: missing"),
        (SEED, "data.mixture.code=0.9", "data.mixture: sums to 0.9 + "),
        (SEED, "data.mixture={cod: 1.0}", "data.mixture.cod = 1.0: unknown domain of data.source; did you mean code?"),
        (SEED, "data.source.kind=web", "data.source.kind = 'web': unknown source; valid: tiny, text, packed"),
        (SEED, "data.source.vocab=9", "data.source.vocab = 9: unknown key; did you mean vocab_size?"),
        (
            SEED,
            "data.source={kind: text, files: {a: [x]}}",
            "data.source: needs vocab_size, to train a tokenizer, or tokenizer",
        ),
        (SEED, "data.source={kind: text, files: {a: [nowhere]}, vocab_size: 300}", "files.a.0 = 'nowhere': matches no"),
        (SEED, "data.source={kind: packed, path: nowhere}", "data.source.path = 'nowhere': no such file"),
        (
            SEED,
            "evaluate.domains=[math]",
            "evaluate.domains = ['math']: math: unknown domain of data.source; valid: code",
        ),
        (SEED, "train.tokens=1.5", "train.tokens = 1.5: Input should be a valid integer"),
        (SEED, "train.tokens='1000'", "train.tokens = '1000': Input should be a valid integer"),
        (SEED, "train.micro_batch=0", "train.micro_batch = 0: Input should be greater than or equal to 1"),
        (SEED, "train.dtype=fp16", "train.dtype = 'fp16': Input should be 'fp32' or 'bf16'"),
        (SEED, "train=null", "train: needs a mapping of keys to values"),
        (SEED, "optimizer.lr=-1", "optimizer.lr = -1: Input should be greater than 0"),
        (SEED, "optimizer={}", "optimizer.lr: missing"),
        (SEED, "optimizer.groups.routers=2.0", "optimizer.groups.routers = 2.0: unknown key; did you mean router?"),
        (SEED, "schedule.kind=linear", "schedule.kind = 'linear': Input should be 'cosine', 'wsd' or 'constant'"),
        (
            SEED,
            "schedule.stable_fraction=0.5",
            "schedule.stable_fraction = 0.5: has no effect on a schedule of kind cosine",
        ),
        (SEED, "deepspeed=ds_configs/zero9.json", "deepspeed = 'ds_configs/zero9.json': no such file"),
        (SEED, "name=../up", "name = '../up': "),
        (MOE, "model.hidden_size=64", "model.hidden_size = 64: unknown key; valid: rope_enabled"),
        (MOE, "model.balance=signs", "model.balance = 'signs': must be one of 'sign'"),
        (MOE, "grow.form=seed", "grow.form = 'seed': unknown key; did you mean from?"),
        (MOE, "grow.steps=[{deapen: {}}]", "grow.steps.0.deapen: unknown operator; did you mean deepen?"),
        (MOE, "grow.steps=[deepen]", "grow.steps.0 = 'deepen': needs one operator with its options"),
    ],
)
def test_a_wrong_value_is_refused_by_name(file, override, message):
    with pytest.raises(RecipeError) as error:
        load_recipe(file, [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith((f"--set {override}: ", f"{file}"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("global_batch:", "global_bach:", ": unknown key; did you mean global_batch?"),
        ("dtype: fp32", "dtype: fp32\n  dtype: bf16", "key dtype is given twice"),
        ("name: seed", "name: [seed", "expected ',' or ']'"),
        ("dtype: fp32", "seed: true", "train.seed = True: Input should be a valid integer"),
    ],
)
def test_an_error_in_a_file_has_its_line(tmp_path, old, new, message):
    text = SEED.read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "stage.yaml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    (found, *_) = [line for line in str(error.value).split("\n") if message in line]
    line = int(found.removeprefix(f"{path}:").partition(":")[0])
    assert abs(line - 1 - text[: text.index(old)].count("\n")) <= 2


def test_every_problem_of_a_file_is_listed():
    with pytest.raises(RecipeError) as error:
        load_recipe(SEED, ["train.tokens=many", "optimizer.lr=fast", "checkpoint.keep=0"])
    assert len(str(error.value).split("\n")) == 3


@pytest.mark.parametrize("text", ["", "- a\n", "just text", "a: \x00", "a: !!python/object:os.system {}"])
def test_files_that_are_no_recipes_are_refused(tmp_path, text):
    (tmp_path / "stage.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"stage\.yaml"):
        load_recipe(tmp_path / "stage.yaml")
    with pytest.raises(RecipeError, match="no such file"):
        load_recipe(tmp_path / "missing.yaml")


def test_overrides_are_yaml_and_win():
    recipe = load_recipe(
        MOE,
        [
            "train.tokens=1e6",
            "optimizer.lr=5e-4",
            "data.mixture={code: 1.0}",
            "grow.steps.0.dense_to_moe.num_experts=7",
        ],
    )
    assert recipe.train.tokens == 1_000_000 and recipe.optimizer.lr == 5e-4
    assert recipe.data.mixture == {"code": 1.0}
    assert recipe.grow.steps[0]["dense_to_moe"]["num_experts"] == 7
    assert recipe.num_experts == 7
    for bad in ("train.tokens", "=3", "name.x=3", "grow.steps.9=1", "train.tokens=[", "train.tokens={a"):
        with pytest.raises(RecipeError, match="--set"):
            load_recipe(MOE, [bad])


def test_the_hash_is_of_the_meaning_not_of_the_file(tmp_path):
    shutil.copytree(TINY, tmp_path / "recipes")
    shutil.copytree(TINY.parents[1] / "ds_configs", tmp_path / "ds_configs")
    path = tmp_path / "recipes" / SEED.name
    path.write_text(
        "# a comment\n" + path.read_text(encoding="utf-8").replace("tokens: ", "tokens:   "), encoding="utf-8"
    )
    recipe = load_recipe(SEED)
    assert load_recipe(path).sha256() == recipe.sha256()
    assert load_recipe(SEED, ["train.seed=1"]).sha256() != recipe.sha256()
    assert load_recipe(SEED, [f"checkpoint.keep={recipe.checkpoint.keep}"]).sha256() == recipe.sha256()


def test_a_resolved_recipe_is_json_and_a_recipe():
    for recipe in load_lineage(TINY).recipes:
        again = Recipe.model_validate(json.loads(json.dumps(recipe.resolved())))
        assert again.sha256() == recipe.sha256()
        with pytest.raises(RecipeError, match=r"^train\.tokens = \d+: too few$"):
            raise again.error("train.tokens", "too few")


def test_steps_cover_the_tokens():
    recipe = load_recipe(SEED, ["train.tokens=20481", "train.global_batch=16", "data.sequence_length=128"])
    assert recipe.total_steps == 11


def test_a_world_that_does_not_divide_the_work_is_refused():
    recipe = load_recipe(MOE, ["train.global_batch=16", "train.micro_batch=4", "train.expert_parallel=2"])
    for world_size in (2, 4):
        recipe.check_world(world_size)
    for world_size, message in (
        (3, r"global_batch = 16: must be a multiple .* 4 \* 3, such as 12"),
        (1, "must divide"),
    ):
        with pytest.raises(RecipeError, match=message):
            recipe.check_world(world_size)
    wide = load_recipe(MOE, ["train.global_batch=16", "train.micro_batch=1", "train.expert_parallel=8"])
    with pytest.raises(RecipeError, match=r"train\.expert_parallel = 8: more ranks than experts, the model has 5"):
        wide.check_world(8)
    wide.check_world(8, num_experts=25)


def test_paths_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_recipe(SEED).deepspeed_file == TINY.parents[1] / "ds_configs" / "zero1.json"


def test_text_files_are_found_in_a_fixed_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "c.jsonl"):
        (tmp_path / name).write_text("")
    source = "data.source={kind: text, files: {mine: ['*.txt', 'a*', c.jsonl]}, vocab_size: 300}"
    recipe = load_recipe(SEED, [source, "data.mixture={mine: 1.0}"])
    assert [file.name for file in recipe.data_source()["files"]["mine"]] == ["a.txt", "b.txt", "c.jsonl"]


def test_the_guide_names_every_key():
    guide = (TINY.parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")

    def keys(section, prefix=""):
        for name, field in section.model_fields.items():
            key = prefix + (field.alias or name)
            inner = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type)]
            inner = [t for t in inner if issubclass(t, BaseModel)]
            yield from keys(inner[0], f"{key}.") if inner and name != "source" else [key]

    missing = [key for key in keys(Recipe) if f"`{key}`" not in guide]
    assert not missing


def test_a_preset_is_a_starting_point():
    config = load_recipe(SEED, ["model={preset: lightninglm-2b-tiny, intermediate_size: 96}"]).build_config()
    assert config.intermediate_size == 96 and config.vocab_size == 2048 and config.num_nextn_predict_layers == 1
    with pytest.raises(RecipeError, match=r"model\.preset = 'lightninglm-3b': unknown preset; did you mean"):
        load_recipe(SEED, ["model={preset: lightninglm-3b}"])


def test_fields_that_a_grown_stage_may_change_exist():
    config = load_recipe(SEED).build_config()
    assert all(hasattr(config, name) for name in GROWN_OVERRIDES)
    recipe = load_recipe(MOE, ["model={rope_enabled: false, balance_speed: 1.0e-4}"])
    assert recipe.config_overrides == {"rope_enabled": False, "balance_speed": 1e-4}
    assert load_recipe(MOE).grow.moments and not load_recipe(MOE, ["grow.moments=false"]).grow.moments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"lineage.yaml": {"stages": ["1-seed.yaml", "9-none.yaml"]}},
            r"lineage\.yaml:\d+: stages\.1 = '9-none\.yaml'",
        ),
        ({"lineage.yaml": {"stages": ["2-moe.yaml", "1-seed.yaml"]}}, r"grow\.from = 'seed': .* must be a seed"),
        ({"lineage.yaml": {"stages": ["1-seed.yaml", "3-deep.yaml"]}}, r"grow\.from = 'moe': unknown earlier stage"),
        ({"lineage.yaml": {"stages": ["1-seed.yaml", "1-seed.yaml"]}}, r"name = 'seed': an earlier stage"),
        ({"lineage.yaml": {"stages": []}}, r"stages = \[\]"),
        ({"lineage.yaml": {"world_size": 7}}, r"global_batch = \d+: must be a multiple"),
        ({"lineage.yaml": {"ranks": 3}}, r"ranks = 3: unknown key"),
        ({"2-moe.yaml": {"name": "again", "grow": None, "model": {}}}, r"2-moe\.yaml"),
        ({"2-moe.yaml": {"grow": {"from": "sed", "steps": []}}}, r"grow\.from = 'sed': .* did you mean seed\?"),
    ],
)
def test_stages_that_do_not_fit_together_are_refused(tmp_path, change, message):
    shutil.copytree(TINY, tmp_path / "recipes")
    shutil.copytree(TINY.parents[1] / "ds_configs", tmp_path / "ds_configs")
    for name, values in change.items():
        path = tmp_path / "recipes" / name
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text(encoding="utf-8")) | values), encoding="utf-8")
    with pytest.raises(RecipeError, match=message):
        load_lineage(tmp_path / "recipes")


def test_experts_are_counted_along_the_lineage(tmp_path):
    with pytest.raises(RecipeError, match=r"3-deep\.yaml.* train\.expert_parallel = 8: more ranks than experts"):
        load_lineage_on(tmp_path, 8, {"3-deep.yaml": 8})


def load_lineage_on(folder, world_size, expert_parallel):
    """The tiny lineage meant for other ranks."""
    shutil.copytree(TINY, folder / "recipes")
    shutil.copytree(TINY.parents[1] / "ds_configs", folder / "ds_configs")
    for path in sorted((folder / "recipes").glob("*.yaml")):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.name == "lineage.yaml":
            values["world_size"] = world_size
        else:
            values["train"] |= {
                "global_batch": 16,
                "micro_batch": 1,
                "expert_parallel": expert_parallel.get(path.name, 1),
            }
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return load_lineage(folder / "recipes")
