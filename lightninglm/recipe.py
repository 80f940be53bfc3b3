"""The schema of recipes: one YAML file per stage, every key and value checked before anything starts."""

import glob
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lightninglm.data.corpus import TINY_DOMAINS, DataError
from lightninglm.data.loader import read_record
from lightninglm.data.tokenizer import TokenizerFolder
from lightninglm.yaml_file import RecipeError, YamlFile, unknown

OPERATORS = (
    "dense_to_moe", "deepen", "multiply_experts", "quantize_experts", "merge_experts", "flatten_router", "switch_stack",
    "resize_vocabulary", "carry_over",
)  # fmt: skip

GROWN_OVERRIDES = (
    "rope_enabled", "rope_theta", "max_position_embeddings", "document_boundaries",
    "balance", "balance_speed", "balance_band", "balance_gain", "router_z_loss_weight",
    "sparse_key_budget", "sparse_min_keys", "sparse_max_keys", "sparse_sink_keys",
    "indexer_kl_weight", "indexer_kl_stride", "mtp_loss_weight", "mtp_num_experts_per_tok", "logit_softcap",
    "stack_backend", "delta_rule_backend", "attention_backend", "experts_backend", "loss_backend",
)  # fmt: skip
"""Fields of the model that a stage may change on a grown checkpoint: none of them gives a tensor another shape."""


def _whole(value: Any) -> Any:
    """5.7e9 is a whole number, as people write them in YAML."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
Share = Annotated[float, Field(ge=0, le=1)]


def _warmup_start(value: float | str) -> float | str:
    if value != "last" and not (isinstance(value, float) and 0 <= value <= 1):
        raise ValueError("must be a number from 0 to 1, or last")
    return value


class Section(BaseModel):
    """Part of a YAML file: unknown keys, wrong types and values that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for key in data if isinstance(data, dict) else ():
            if key not in known:
                raise PydanticCustomError("unknown_key", "{problem}", {"key": key, "problem": unknown(key, known)})
        return data


class TinySource(Section):
    """Text that the installation itself holds (docs/data.md), and a tokenizer trained on it."""

    kind: Literal["tiny"]
    vocab_size: Count = 2048


class TextSource(Section):
    """Your own `.txt` and `.jsonl` files, by domain; the tokenizer is trained on them or taken from a folder."""

    kind: Literal["text"]
    files: Annotated[dict[Name, list[str]], Field(min_length=1)]
    vocab_size: Count | None = None
    tokenizer: str | None = None
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05

    @model_validator(mode="after")
    def _one_tokenizer(self) -> "TextSource":
        if (self.vocab_size is None) == (self.tokenizer is None):
            raise ValueError("needs vocab_size, to train a tokenizer, or tokenizer, a folder that has one; not both")
        return self


class PackedSource(Section):
    """A data folder that an earlier run prepared."""

    kind: Literal["packed"]
    path: str


class DataSection(Section):
    """source: where sequences come from. mixture: share of each domain. seed: of the global order."""

    source: Annotated[TinySource | TextSource | PackedSource, Field(discriminator="kind")] | None = None
    sequence_length: Annotated[Whole, Field(ge=2)]
    mixture: Annotated[dict[str, Share], Field(min_length=1)]
    seed: Whole = 0

    @model_validator(mode="after")
    def _sums_to_one(self) -> "DataSection":
        total = sum(self.mixture.values())
        if abs(total - 1) > 1e-6:
            shares = " + ".join(f"{share:g}" for share in self.mixture.values())
            raise PydanticCustomError(
                "mixture", "{problem}", {"key": "mixture", "problem": f"sums to {shares} = {total:.7g}, must sum to 1"}
            )
        return self


class SampledSelectionSection(Section):
    """Experts are sampled at first: noise of this temperature on the selection scores, falling to 0 over the steps."""

    steps: Count
    temperature: Annotated[float, Field(gt=0)] = 0.1


class TrainSection(Section):
    """tokens: of the whole stage. global_batch: sequences per optimizer step. micro_batch: per rank and forward pass.
    expert_parallel: ranks that share one set of experts. seed: of the initialisation. merge_adapters_every: steps after
    which adapters are merged into their quantized base and start anew, never unless given; merge_adapters_warmup: steps
    over which their learning rate then rises again. max_skipped_steps: non-finite steps in a row that end training."""

    tokens: Count
    global_batch: Count
    micro_batch: Count
    expert_parallel: Count = 1
    dtype: Literal["fp32", "bf16"] = "bf16"
    seed: Whole = 0
    merge_adapters_every: Count | None = None
    merge_adapters_warmup: Annotated[Whole, Field(ge=0)] = 10
    sampled_selection: SampledSelectionSection | None = None
    max_skipped_steps: Count = 3


class LearningRateGroups(Section):
    """Multipliers of the learning rate, by the role of a parameter."""

    router: Annotated[float, Field(ge=0)] = 1.0
    adapters: Annotated[float, Field(ge=0)] = 1.0
    rest: Annotated[float, Field(ge=0)] = 1.0


class OptimizerSection(Section):
    """AdamW. lr: peak learning rate. clip: largest global gradient norm, 0 for no clipping."""

    lr: Annotated[float, Field(gt=0)]
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(ge=0)] = 1.0
    groups: LearningRateGroups = LearningRateGroups()


class ScheduleSection(Section):
    """Learning rate over the stage: linear warm-up from `warmup_from` (a fraction of the peak, or `last` for the rate
    at which the parent stage ended), over steps or tokens, then `kind`.
    final_ratio: the last rate over the peak (cosine, wsd). stable_fraction: of all steps, before wsd decays."""

    kind: Literal["cosine", "wsd", "constant"]
    warmup_steps: Annotated[Whole, Field(ge=0)] = 0
    warmup_tokens: Count | None = None
    warmup_from: Annotated[float | str, AfterValidator(_warmup_start)] = 0.0
    stable_fraction: Share = 0.85
    final_ratio: Share = 0.1

    @model_validator(mode="after")
    def _no_idle_keys(self) -> "ScheduleSection":
        idle = {"cosine": {"stable_fraction"}, "wsd": set(), "constant": {"stable_fraction", "final_ratio"}}[self.kind]
        for key in sorted(idle & self.model_fields_set):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise PydanticCustomError(
                    "idle_key", "{problem}", {"key": key, "problem": f"has no effect on a schedule of kind {self.kind}"}
                )
        if self.warmup_tokens is not None and self.warmup_steps:
            raise ValueError("has warmup_steps and warmup_tokens, needs one of them")
        if self.warmup_from == "last" and not (self.warmup_steps or self.warmup_tokens):
            raise ValueError("warmup_from: last needs warmup_steps or warmup_tokens")
        return self


class EvaluateSection(Section):
    """Held-out loss every so many steps and at the end. domains: all unless given. sequences: at most, per domain."""

    every: Count = 500
    domains: Annotated[list[str], Field(min_length=1)] | None = None
    sequences: Count = 16


class CheckpointSection(Section):
    """A checkpoint every so many steps and at the end; the newest `keep` stay. asynchronous: copied to host memory and
    written while training goes on. verify: what a start checks of the checkpoint it goes on from, every byte or a
    sample."""

    every: Count = 500
    keep: Count = 3
    asynchronous: bool = False
    verify: Literal["full", "fast"] = "full"


class LoggingSection(Section):
    """The terminal and metrics.jsonl always; Weights & Biases when asked."""

    wandb: bool = False
    project: str = "lightninglm"


class GrowSection(Section):
    """from: the stage whose last checkpoint is the source. steps: operators with their options, in order; with none
    the stage only trains on. moments: carry the optimizer's state; without it Adam starts anew.
    new_tensor_warmup: steps over which the learning rate of new tensors rises."""

    source: Annotated[Name, Field(alias="from")]
    steps: list[dict[str, dict[str, Any]]]
    moments: bool = True
    new_tensor_warmup: Annotated[Whole, Field(ge=0)] = 100

    @model_validator(mode="before")
    @classmethod
    def _known_operators(cls, data: Any) -> Any:
        steps = data.get("steps") if isinstance(data, dict) else None
        if not isinstance(steps, list):
            return data
        for i, step in enumerate(steps):
            if not isinstance(step, dict) or len(step) != 1:
                problem = f"needs one operator with its options, as `- deepen: {{...}}`; known: {', '.join(OPERATORS)}"
                raise PydanticCustomError("step", "{problem}", {"key": f"steps.{i}", "problem": problem})
            (operator,) = step
            if operator not in OPERATORS:
                problem = unknown(operator, OPERATORS, "operator")
                raise PydanticCustomError("step", "{problem}", {"key": f"steps.{i}.{operator}", "problem": problem})
        return data | {"steps": [{operator: options or {}} for step in steps for operator, options in step.items()]}


class Recipe(Section):
    """One stage, as its YAML file says it; see docs/recipes.md."""

    name: Name
    model: dict[str, Any] | None = None
    grow: GrowSection | None = None
    data: DataSection
    train: TrainSection
    optimizer: OptimizerSection
    schedule: ScheduleSection
    deepspeed: str
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()

    _file: YamlFile | None = PrivateAttr(default=None)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the stage: the last one may pass the number of tokens asked for."""
        return math.ceil(self.train.tokens / (self.train.global_batch * self.data.sequence_length))

    @property
    def schedule_in_steps(self) -> ScheduleSection:
        """The schedule with its warm-up in optimizer steps, rounded up."""
        if self.schedule.warmup_tokens is None:
            return self.schedule
        steps = math.ceil(self.schedule.warmup_tokens / (self.train.global_batch * self.data.sequence_length))
        return self.schedule.model_copy(update={"warmup_steps": steps, "warmup_tokens": None})

    @property
    def deepspeed_file(self) -> Path:
        """The DeepSpeed configuration, found from the current folder or from the folders above the recipe."""
        return self._find("deepspeed", self.deepspeed)

    @property
    def num_experts(self) -> int | None:
        """Routed experts of this stage, 0 for a dense one, None when only its parent knows."""
        for step in reversed(self.grow.steps if self.grow else []):
            for options in step.values():
                if isinstance(options.get("num_experts"), int):
                    return options["num_experts"]
        return None if self.grow else self.build_config().num_experts

    def resolved(self) -> dict[str, Any]:
        """The whole recipe as JSON values, defaults and overrides included."""
        return self.model_dump(mode="json", by_alias=True)

    def sha256(self) -> str:
        """Identity of the resolved recipe."""
        text = json.dumps(self.resolved(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def is_same(self, resolved: dict[str, Any]) -> bool:
        """Whether this is the recipe that was once `resolved`; keys that are new since then count as their default."""
        try:
            return Recipe.model_validate(resolved).sha256() == self.sha256()
        except ValidationError:  # it has a key that recipes have lost since
            return False

    def build_config(self, **fixed):
        """The LightningLMConfig of a seed. `fixed` are fields that the run knows better (token ids)."""
        assert self.grow is None, "the configuration of a grown stage comes from its checkpoint"
        from lightninglm.modeling.configuration_lightninglm import LightningLMConfig  # imports transformers: seconds
        from lightninglm.modeling.presets import PRESETS, preset

        values, build = dict(self.model or {}), LightningLMConfig
        if (name := values.pop("preset", None)) is not None:
            if name not in PRESETS:
                raise self.error("model.preset", unknown(name, PRESETS, "preset"))
            build = partial(preset, name)
        if self.data.source is not None:
            vocab_size = self._source_contents()[1]
            if values.setdefault("vocab_size", vocab_size) != vocab_size:
                raise self.error("model.vocab_size", f"must be that of the tokenizer of data.source, {vocab_size}")
        config = self._checked_config(build, values, LightningLMConfig.__annotations__, fixed)
        if self.data.sequence_length > config.max_position_embeddings:
            raise self.error(
                "data.sequence_length", f"above model.max_position_embeddings = {config.max_position_embeddings}"
            )
        return config

    @property
    def config_overrides(self) -> dict[str, Any]:
        """What a grown stage changes in the configuration of its checkpoint."""
        return dict(self.model or {}) if self.grow else {}

    def data_source(self) -> dict[str, Any]:
        """`data.source` for `lightninglm.data.prepare`, with its paths found and its globs expanded."""
        source = self.data.source
        if source is None:
            raise self.error("data.source", "missing; needs kind tiny, text or packed (docs/data.md)")
        values = source.model_dump()
        if isinstance(source, PackedSource):
            values["path"] = str(self._find("data.source.path", source.path))
        if isinstance(source, TextSource):
            values["files"] = {domain: self._glob(domain, globs) for domain, globs in source.files.items()}
            if source.tokenizer is not None:
                values["tokenizer"] = str(self._find("data.source.tokenizer", source.tokenizer))
        return values

    def check_world(self, world_size: int, num_experts: int | None = None) -> None:
        """
        Refuses a number of ranks that the batch or the experts cannot be divided over, with a RecipeError.

        num_experts: as the checkpoint has them, for a grown stage whose recipe does not say.
        """
        train = self.train
        if train.global_batch % (train.micro_batch * world_size):
            near = train.micro_batch * world_size
            raise self.error(
                "train.global_batch",
                f"must be a multiple of train.micro_batch * ranks = {train.micro_batch} * {world_size}, such as "
                f"{max(near, train.global_batch // near * near)}",
            )
        if train.expert_parallel > world_size or world_size % train.expert_parallel:
            valid = [n for n in range(1, world_size + 1) if world_size % n == 0]
            problem = f"must divide the {world_size} ranks: {', '.join(map(str, valid))}"
            raise self.error("train.expert_parallel", problem)
        num_experts = self.num_experts if num_experts is None else num_experts
        if num_experts is not None and train.expert_parallel > max(1, num_experts):
            raise self.error(
                "train.expert_parallel",
                f"more ranks than experts, the model has {num_experts}; at most {max(1, num_experts)}",
            )

    def error(self, key: str, problem: str) -> RecipeError:
        """The error about one dotted key of this recipe, with its file, line and value."""
        return self._yaml.error(key, problem)

    @property
    def _yaml(self) -> YamlFile:
        return self._file or YamlFile(None, self.resolved())

    def _check(self) -> None:
        """What needs more than one section, files, or the model's own rules."""
        if self.grow is None:
            if self.model is None:
                raise self.error("model", "missing; a stage has a model, or grows from a parent (grow: {from: ...})")
            if self.schedule.warmup_from == "last":
                raise self.error("schedule.warmup_from", "a seed has no stage before it; needs a number from 0 to 1")
            self.build_config()
        else:
            from lightninglm.modeling.configuration_lightninglm import LightningLMConfig

            known = {name: LightningLMConfig.__annotations__[name] for name in GROWN_OVERRIDES}
            self._checked_config(LightningLMConfig, self.config_overrides, known, {"num_experts": 20})
        self.deepspeed_file  # noqa: B018  raises when there is none
        if self.data.source is None:
            return
        domains, _ = self._source_contents()
        for domain in self.data.mixture:
            if domain not in domains:
                raise self.error(f"data.mixture.{domain}", unknown(domain, domains, "domain of data.source"))
        for domain in self.evaluate.domains or ():
            if domain not in domains:
                raise self.error("evaluate.domains", f"{domain}: {unknown(domain, domains, 'domain of data.source')}")

    def _checked_config(self, build: Callable, values: dict[str, Any], known: Mapping[str, Any], fixed: dict[str, Any]):
        """`build(**values, **fixed)` after checking the values' names and types. known: type of each field."""
        for key, value in values.items():
            if key not in known:
                note = "; a grown stage may change nothing else" if self.grow else ""
                raise self.error(f"model.{key}", unknown(key, known) + note)
            try:
                TypeAdapter(known[key], config=ConfigDict(strict=True)).validate_python(value)
            except ValidationError as error:
                raise self.error(f"model.{key}", error.errors()[0]["msg"]) from error
        try:
            return build(**(fixed | values))
        except ValueError as error:  # its message begins with config.<field> and has the value
            problem = str(error).replace("config.", "model.")
            raise RecipeError(self._yaml.place(problem.split()[0]) + problem) from error

    def _source_contents(self) -> tuple[Sequence[str], int]:
        """Domains and vocabulary size of data.source."""
        values = self.data_source()
        if values["kind"] == "tiny":
            return TINY_DOMAINS, values["vocab_size"]
        try:
            if values["kind"] == "text":
                tokenizer = values["tokenizer"]
                return list(values["files"]), values["vocab_size"] or TokenizerFolder.load(tokenizer).vocab_size
            record = read_record(Path(values["path"]))
        except DataError as error:
            raise self.error("data.source", str(error)) from error
        lengths = record["packed"] if record else {}
        if str(self.data.sequence_length) not in lengths:
            found = f"sequences of length {', '.join(lengths)}" if lengths else "no data.json"
            problem = f"has {found}, needs sequences of data.sequence_length = {self.data.sequence_length}"
            raise self.error("data.source.path", problem)
        return list(lengths[str(self.data.sequence_length)]), record["vocab_size"]

    def _bases(self) -> list[Path]:
        return [Path.cwd(), *(self._file.path.resolve().parents if self._file else ())]

    def _find(self, key: str, path: str) -> Path:
        for base in self._bases():
            if (base / path).exists():
                return base / path
        raise self.error(key, "no such file, neither from the current folder nor from any folder above the recipe")

    def _glob(self, domain: str, patterns: list[str]) -> list[Path]:
        files: list[Path] = []
        for i, pattern in enumerate(patterns):
            matches = (glob.glob(str(base / pattern), recursive=True) for base in self._bases())
            found = next(filter(None, matches), [])
            if not found:
                raise self.error(f"data.source.files.{domain}.{i}", "matches no file")
            files += [Path(file) for file in sorted(found) if Path(file) not in files]
        return files


class _LineageFile(Section):
    name: Name
    world_size: Count = 1
    stages: Annotated[list[str], Field(min_length=1)]


@dataclass(frozen=True)
class Lineage:
    """Stages in order, each growing from an earlier one. files: the YAML file of each. world_size: ranks it is meant
    for."""

    name: str
    world_size: int
    files: list[Path]
    recipes: list[Recipe]


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """
    Reads and checks one stage.

    overrides: `dotted.key=value` each, the value in YAML; they win over the file.
    Raises RecipeError.
    """
    file = YamlFile.read(Path(path))
    for override in overrides:
        file.set(override)
    recipe = validate(Recipe, file)
    recipe._file = file
    recipe._check()
    return recipe


def load_lineage(folder: str | Path, overrides: Iterable[str] = (), world_size: int | None = None) -> Lineage:
    """
    Reads `lineage.yaml` of a folder and all its stages, and checks that they fit together.

    overrides: applied to every stage. world_size: ranks to check for, instead of those that lineage.yaml says.
    Raises RecipeError.
    """
    path, overrides = Path(folder), list(overrides)
    file = YamlFile.read(path / "lineage.yaml" if path.is_dir() else path)
    listed = validate(_LineageFile, file)
    ranks = listed.world_size if world_size is None else world_size
    lineage = Lineage(listed.name, ranks, [file.path.parent / stage for stage in listed.stages], [])
    experts: dict[str, int] = {}  # of each stage so far
    for i, stage in enumerate(lineage.files):
        if not stage.is_file():
            raise file.error(f"stages.{i}", f"no such file in {file.path.parent}")
        recipe = load_recipe(stage, overrides)
        if recipe.name in experts:
            raise recipe.error("name", "an earlier stage of the lineage has this name")
        if recipe.grow is None and experts:
            raise recipe.error("grow", f"missing; only the first stage is a seed. From: {', '.join(experts)}")
        if recipe.grow is not None and recipe.grow.source not in experts:
            raise recipe.error(
                "grow.from", unknown(recipe.grow.source, experts, f"earlier stage of {file.path}") if experts
                else f"this is the first stage of {file.path}, which must be a seed",
            )  # fmt: skip
        if lineage.recipes and recipe.data.source != lineage.recipes[0].data.source:
            raise recipe.error("data.source", f"not that of stage {lineage.recipes[0].name}; a lineage has one")
        known = recipe.num_experts
        experts[recipe.name] = experts[recipe.grow.source] if known is None else known
        recipe.check_world(lineage.world_size, experts[recipe.name])
        lineage.recipes.append(recipe)
    return lineage


PROBLEMS = {
    "missing": "missing",
    "model_type": "needs a mapping of keys to values",
    "dict_type": "needs a mapping of keys to values",
    "union_tag_not_found": "missing; valid: tiny, text, packed",
    "union_tag_invalid": "unknown source; valid: tiny, text, packed",
}
"""Our words for some kinds of pydantic errors; its own serve for the others."""


def validate(section: type[Section], file: YamlFile):
    """The checked content of a file. Raises RecipeError with a line for every problem."""
    try:
        return section.model_validate(file.values)
    except ValidationError as error:
        problems = []
        for found in error.errors():
            key = file.key_at(found["loc"], missing=found["type"] == "missing")
            if (inner := found.get("ctx", {}).get("key")) is not None:
                key = f"{key}.{inner}" if key else inner
            if found["type"].startswith("union_tag"):
                key = f"{key}.kind"
            problem = PROBLEMS.get(found["type"]) or found["msg"].removeprefix("Value error, ")
            problems.append(str(file.error(key, problem)))
        raise RecipeError("\n".join(problems)) from error
