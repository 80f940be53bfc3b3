"""A run folder with a little data and a recipe of a model so small that a step takes milliseconds."""

import json
import random
from pathlib import Path

import yaml

from lightninglm.data.prepare import prepare
from lightninglm.recipe import load_recipe

MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "num_attention_heads": 2,
    "head_dim": 16,
    "indexer_num_heads": 2,
    "indexer_head_dim": 8,
    "sparse_key_budget": 8,
    "sparse_min_keys": 4,
    "sparse_max_keys": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 5,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 64,
}
SEQUENCE_LENGTH = 32


def make_run(folder: Path, **changes) -> tuple[Path, Path]:
    """
    Prepares data and writes a recipe; returns (run folder, recipe file).

    changes: dotted recipe keys with `__` for the dot, e.g. train__micro_batch=2.
    """
    words = random.Random(0)
    vocabulary = ["".join(words.choices("abcdefghij", k=words.randint(2, 7))) for _ in range(300)]
    for domain in ("prose", "verse"):
        text = "\n".join(
            json.dumps({"text": " ".join(words.choices(vocabulary[: 150 if domain == "prose" else 300], k=40))})
            for _ in range(400)
        )
        (folder / f"{domain}.jsonl").write_text(text + "\n")
    values = {
        "name": "small",
        "model": MODEL,
        "data": {
            "source": {
                "kind": "text",
                "vocab_size": 320,
                "heldout_fraction": 0.1,
                "files": {domain: [str(folder / f"{domain}.jsonl")] for domain in ("prose", "verse")},
            },
            "sequence_length": SEQUENCE_LENGTH,
            "mixture": {"prose": 0.75, "verse": 0.25},
        },
        "train": {
            "tokens": 12 * 8 * SEQUENCE_LENGTH,
            "global_batch": 8,
            "micro_batch": 2,
            "expert_parallel": 1,
            "dtype": "fp32",
        },
        "optimizer": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip": 0.5},
        "schedule": {"kind": "cosine", "warmup_steps": 3, "final_ratio": 0.1},
        "deepspeed": "ds_configs/zero1.json",
        "evaluate": {"every": 6, "sequences": 3},
        "checkpoint": {"every": 4, "keep": 10},
    }
    for key, value in changes.items():
        *sections, last = key.split("__")
        section = values
        for name in sections:
            section = section[name]
        section[last] = value
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump(values))
    run = folder / "run"
    recipe = load_recipe(file)
    prepare(recipe.data_source(), run / "data", SEQUENCE_LENGTH)
    return run, file
