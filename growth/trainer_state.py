"""What crosses a growth step besides tensors: counters, data position, ramps, warm-ups, lineage."""

from collections.abc import Mapping
from typing import Any

from growth.job import GrowthJob
from growth.moments import NEW_TENSOR_WARMUP_STEPS


def grown_trainer_state(job: GrowthJob, stage: str) -> dict[str, Any]:
    """trainer_state.json of the target: step 0 of `stage`, everything that crosses a growth step carried."""
    old = job.reader.trainer_state
    data = old["data"]
    names = [name for name in job.plan.origins if job.table[name].trainable and starts_fresh(job, name)]
    return {
        "format": old["format"],
        "stage": stage,
        "step": 0,
        "total_steps": 0,
        "tokens": 0,
        "lineage_tokens": old["lineage_tokens"],
        "finished": False,
        "adam_step": old["adam_step"] if job.moments else 0.0,
        "data": {**data, "position": 0, "domain_offsets": data["next_domain_offsets"]},
        "ramps": ramps(job),
        "new_tensors": {
            "names": list(dict.fromkeys(job.table[name].memory_name for name in names)),
            "warmup_steps": NEW_TENSOR_WARMUP_STEPS,
        },
        "seed": old["seed"],
        "lineage": [*old["lineage"], *([_trained_stage(old)] if old["step"] else [])],
        "skipped_steps": 0,
        "parent_learning_rate": old.get("learning_rate", old.get("parent_learning_rate")),
    }


def _trained_stage(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entry in the lineage of a stage that has trained."""
    return {
        "stage": state["stage"],
        "steps": state["step"],
        "tokens": state["tokens"],
        "recipe_sha256": state.get("recipe_sha256"),
    }


def ramps(job: GrowthJob) -> dict[str, Any]:
    """The step sizes that still have to rise: those of the plan, else what the source's own ramp has left."""
    if job.plan.step_size_ramp is not None:
        return {"step_size": job.plan.step_size_ramp}
    old = job.reader.trainer_state["ramps"].get("step_size")
    left = old["steps"] - job.reader.trainer_state["step"] if old else 0
    if left <= 0:
        return {}
    return {"step_size": {"from": list(job.plan.config.step_sizes), "to": old["to"], "steps": left}}


def starts_fresh(job: GrowthJob, name: str) -> bool:
    """Whether a trained tensor needs a warm-up: without moments by the rule, or made of one whose own is not over."""
    origin = job.plan.origins[name]
    old = job.reader.trainer_state
    warming = old["new_tensors"]["names"] if old["step"] < old["new_tensors"]["warmup_steps"] else ()
    return origin.moment() is None or any(job.source.table[parent].memory_name in warming for parent in origin.sources)
