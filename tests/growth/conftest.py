"""Checkpoints that several test files grow from."""

import pytest
import torch
from safetensors.torch import save_file
from small_checkpoints import MIXTURE, QUANTIZABLE, VOCABULARY, small_config, write_checkpoint, write_tokenizer

from growth.core import grow


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def heldout(tmp_path_factory):
    file = tmp_path_factory.mktemp("heldout") / "heldout.safetensors"
    random = torch.Generator().manual_seed(5)
    ids = {d: torch.randint(VOCABULARY, (2, 40), generator=random, dtype=torch.int32) for d in ("code", "english")}
    save_file(ids, file)
    return file


@pytest.fixture(scope="session")
def dense(tmp_path_factory, tokenizer):
    return write_checkpoint(tmp_path_factory.mktemp("dense") / "step-00000300", small_config(), tokenizer)


@pytest.fixture(scope="session")
def mixture(tmp_path_factory, tokenizer):
    return write_checkpoint(tmp_path_factory.mktemp("mixture") / "step-00000300", small_config(**MIXTURE), tokenizer)


@pytest.fixture(scope="session")
def quantizable(tmp_path_factory, tokenizer):
    config = small_config(**MIXTURE, **QUANTIZABLE)
    return write_checkpoint(tmp_path_factory.mktemp("quantizable") / "step-00000300", config, tokenizer)


@pytest.fixture
def grown(tmp_path):
    """grown(source, operator, **options) -> the grown checkpoint's folder."""
    count = iter(range(100))

    def run(source, operator, *, seed=3, heldout=None, moments=True, **options):
        target = tmp_path / f"grown-{next(count)}"
        grow(
            source,
            target,
            operator,
            options,
            stage="next",
            seed=seed,
            heldout=heldout,
            moments=moments,
            progress=False,
        )
        return target

    return run
