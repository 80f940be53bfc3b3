"""Is a checkpoint what an operator may grow from? Names, shapes, dtypes, tokenizer, optimizer state, counters."""

from pathlib import Path

import torch

from growth.errors import GrowthError
from growth.moments import EXP_AVG, EXP_AVG_SQ, MASTER
from growth.operator import Source, listed
from growth.tensor_table import table_problems, tensor_table
from lightninglm.checkpoint import CheckpointReader, base_hashes, check_bases
from lightninglm.modeling.byte_embedding import token_bytes, tokens_sha256
from lightninglm.modeling.configuration_lightninglm import LightningLMConfig

STATE_KEYS = (
    "format", "stage", "step", "tokens", "lineage_tokens", "adam_step", "data", "ramps", "new_tensors", "seed",
    "lineage",
)  # fmt: skip


def read_source(reader: CheckpointReader) -> Source:
    """The source as an operator sees it. Raises GrowthError, naming tensors, unless it is what its config says,
    and ExpertBaseError unless quantized experts have the base that their adapters were trained on."""
    try:
        config = LightningLMConfig.from_dict(dict(reader.config))
    except ValueError as error:
        raise GrowthError(f"{reader.folder / 'config.json'}: {error}") from error
    lacking = [key for key in STATE_KEYS if key not in reader.trainer_state]
    if lacking or "next_domain_offsets" not in reader.trainer_state["data"]:
        raise GrowthError(
            f"{reader.folder / 'trainer_state.json'}: lacks {listed(lacking or ['data.next_domain_offsets'])}; growth "
            "starts from a checkpoint that training or growth wrote"
        )
    problems = table_problems(reader.weights, config)
    if problems:
        shown = listed([f"{name} (found {found}, expected {expected})" for name, found, expected in problems])
        raise GrowthError(f"{reader.folder}: {len(problems)} tensor(s) do not fit its config.json: {shown}")
    steps = reader.read("model.step_size").tolist()
    if steps != torch.tensor(config.step_sizes, dtype=torch.float32).tolist():
        raise GrowthError(f"{reader.folder}: model.step_size is {steps}, config.step_sizes is {config.step_sizes}")
    tokens = check_tokenizer(reader.folder, config)
    found = base_hashes({name: info.sha256 for name, info in reader.weights.items()})
    check_bases(reader.folder, reader.trainer_state.get("expert_bases"), found)
    return Source(config, tensor_table(config), reader.trainer_state, tokens)


def check_tokenizer(folder: Path, config: LightningLMConfig) -> list[bytes]:
    """The bytes of all tokens. Raises GrowthError unless they are those that the model was trained with."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise GrowthError(f"{file}: missing; the byte embedding is built from it")
    tokens = token_bytes(file)
    found = tokens_sha256(tokens)
    if config.tokenizer_sha256 not in (None, found):
        raise GrowthError(
            f"{file}: another tokenizer than the model was trained with (its tokens have SHA-256 "
            f"{found[:16]}..., config.tokenizer_sha256 is {config.tokenizer_sha256[:16]}...)"
        )
    return tokens


def check_optimizer_state(reader: CheckpointReader, source: Source) -> None:
    """Raises GrowthError unless there is Adam state for every trained parameter, of its shape, and for nothing else."""
    if not reader.optimizer:
        raise GrowthError(
            f"{reader.folder}: holds no optimizer state to carry; ask for a fresh optimizer (--drop-moments) or take a "
            "checkpoint that training wrote"
        )
    expected = {}
    for name, spec in source.table.items():
        if spec.trainable:
            parts = (EXP_AVG, EXP_AVG_SQ)
            if reader.weights[name].dtype != torch.float32:
                parts = (MASTER, *parts)
            expected |= {f"{name}.{part}": spec.shape for part in parts}
    missing = [name for name in expected if name not in reader.optimizer]
    extra = [name for name in reader.optimizer if name not in expected]
    if missing or extra:
        parts = [f"{len(missing)} missing: {listed(missing)}"] * bool(missing)
        parts += [f"{len(extra)} of no trained parameter: {listed(extra)}"] * bool(extra)
        raise GrowthError(f"{reader.folder}: its optimizer state is not that of its parameters; " + "; ".join(parts))
    for name, shape in expected.items():
        info = reader.optimizer[name]
        if info.shape != shape or info.dtype != torch.float32:
            raise GrowthError(
                f"{reader.folder}: {name} is {info.dtype} {info.shape}, its parameter needs torch.float32 {shape}: "
                "the state of another parameter"
            )
