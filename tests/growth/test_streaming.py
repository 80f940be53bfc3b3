"""Growth is deterministic, keeps few tensors in memory, and leaves nothing behind when it is interrupted."""

import hashlib
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

import growth.job
from growth.__main__ import main
from growth.core import grow
from growth.job import KEPT_TENSORS, parse_options, plan_growth
from lightninglm.checkpoint import CheckpointReader

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = [
    ("dense", "dense_to_moe", {"num_experts": 4, "strategy": "paper"}),
    ("mixture", "deepen", {"source_layers": [0, 1, 2, 3, 0, 1]}),
    ("mixture", "multiply_experts", {"num_experts": 12, "noise": 0.1}),
    ("mixture", "multiply_experts", {"num_experts": 12, "strategy": "paper"}),
    ("quantizable", "quantize_experts", {"rank": 4, "group_size": 32}),
]


def content(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("source,operator,options", STRATEGIES)
def test_two_runs_with_one_seed_are_bitwise_equal(source, operator, options, grown, request):
    source = request.getfixturevalue(source)
    first, second, other = (grown(source, operator, seed=seed, **options) for seed in (3, 3, 4))
    files = content(first)
    for name in ("growth_receipt.json", "manifest.json"):  # these hold the time it took
        files.pop(name)
    assert files == {name: sha256 for name, sha256 in content(second).items() if name in files}
    tensors = [CheckpointReader(folder).manifest["tensors"] for folder in (first, second, other)]
    assert tensors[0] == tensors[1]
    assert (tensors[0] != tensors[2]) == (operator != "deepen")  # nothing in it is random


def test_few_tensors_are_held_at_once(mixture, monkeypatch):
    """However many experts are made, only the tensors of the step at hand and the parent's are alive."""
    read, held = CheckpointReader.read, []

    def recorded(reader, name, rows=None):
        tensor = read(reader, name, rows)
        held.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(CheckpointReader, "read", recorded)
    options = parse_options("multiply_experts", {"num_experts": 60, "noise": 0.1})
    with CheckpointReader(mixture) as reader:
        job = plan_growth(reader, "multiply_experts", options, seed=0)
        most = 0
        for _, tensor in job.tensors():
            held.append(weakref.ref(tensor))
            del tensor
            most = max(most, len({id(alive) for reference in held if (alive := reference()) is not None}))
    assert 0 < most <= KEPT_TENSORS + 2


def test_an_interrupted_growth_leaves_the_source_and_no_target(mixture, tmp_path, monkeypatch):
    before = content(mixture)
    tensors = growth.job.GrowthJob.tensors

    def interrupted(job):
        for i, pair in enumerate(tensors(job)):
            if i == 200:
                raise KeyboardInterrupt
            yield pair

    monkeypatch.setattr(growth.job.GrowthJob, "tensors", interrupted)
    target = tmp_path / "target"
    options = {"num_experts": 12}
    with pytest.raises(KeyboardInterrupt):
        grow(mixture, target, "multiply_experts", options, stage="next", progress=False)
    assert list(tmp_path.iterdir()) == []
    assert content(mixture) == before
    monkeypatch.undo()
    grow(mixture, target, "multiply_experts", options, stage="next", progress=False)
    assert CheckpointReader(target, verify="full").trainer_state["step"] == 0


def test_sigterm_cleans_up(mixture, tmp_path, monkeypatch, capsys):
    tensors = growth.job.GrowthJob.tensors

    def stopped(job):
        for i, pair in enumerate(tensors(job)):
            if i == 200:
                os.kill(os.getpid(), signal.SIGTERM)
            yield pair

    monkeypatch.setattr(growth.job.GrowthJob, "tensors", stopped)
    arguments = ["--source", str(mixture), "--target", str(tmp_path / "target"), "--num-experts", "12"]
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["multiply_experts", *arguments]) == 130
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert "the source is untouched" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_killed_growth_can_be_started_again(mixture, tmp_path):
    before = content(mixture)
    target = tmp_path / "target"
    script = (  # kills itself in the middle
        "import os, signal, sys, growth.job as job_module\n"
        "from growth.__main__ import main\n"
        "tensors = job_module.GrowthJob.tensors\n"
        "kill = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
        "job_module.GrowthJob.tensors = lambda job: (p for i, p in enumerate(tensors(job)) if i < 300 or kill())\n"
        "main(sys.argv[1:])\n"
    )
    arguments = ["multiply_experts", "--source", str(mixture), "--target", str(target), "--num-experts", "12"]
    assert subprocess.run([sys.executable, "-c", script, *arguments], cwd=ROOT).returncode == -signal.SIGKILL
    assert not target.exists() and list(tmp_path.iterdir()) and content(mixture) == before
    grow(mixture, target, "multiply_experts", {"num_experts": 12}, stage="stage", progress=False)
    assert list(tmp_path.iterdir()) == [target]
