"""`doctor checkpoint`: every damage is named, and what a resume takes is what a resume takes."""

import json
import shutil
from pathlib import Path

import pytest

from launch.doctor import main
from lightninglm.checkpoint import CheckpointWriter, newest_checkpoint, set_aside, step_folder
from tests.checkpoint.checkpoints import CONFIG, STATE, tensors


@pytest.fixture
def stage(tmp_path) -> Path:
    """A stage with two checkpoints."""
    for step in (3, 7):
        with CheckpointWriter(tmp_path / "run" / "seed" / step_folder(step), shard_bytes=400) as writer:
            for name, tensor in tensors(step).items():
                writer.add(name, tensor)
            writer.commit(CONFIG, STATE | {"step": step, "finished": step == 7})
    return tmp_path / "run" / "seed"


def report(capsys, *arguments) -> tuple[int, list[dict]]:
    code = main(["checkpoint", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)["checks"]


@pytest.mark.parametrize("where", ["run", "stage"])
def test_a_sound_stage(stage, where, capsys):
    code, checks = report(capsys, stage if where == "stage" else stage.parent)
    assert code == 0
    assert [check["state"] for check in checks] == ["ok"] * 3
    assert checks[-1]["found"] == "a resume takes step-00000007: the stage has finished"


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[-1] ^= 1
        path.write_bytes(content)


FILES = (
    "model-00000-00001.safetensors", "model.safetensors.index.json", "optimizer-00000-00001.safetensors",
    "optimizer.index.json", "config.json", "generation_config.json", "trainer_state.json", "manifest.json",
)  # fmt: skip


@pytest.mark.parametrize("how", ["delete", "truncate", "flip"])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_and_the_checkpoint_before_is_taken(stage, name, how, capsys):
    damage(stage / step_folder(7) / name, how)
    code, checks = report(capsys, stage, "--full")
    by_name = {Path(check["name"]).name: check for check in checks}
    assert code == 1
    assert by_name["step-00000007"]["state"] == "problem" and name in by_name["step-00000007"]["found"]
    assert by_name["step-00000003"]["state"] == "ok"
    assert "a resume takes step-00000003" in by_name["seed"]["found"]
    assert newest_checkpoint(stage, "full")[0] == stage / step_folder(3)


def test_what_killed_runs_leave_is_explained(stage, capsys):
    shutil.copytree(stage / step_folder(7), stage / ".tmp-step-00000009")
    shutil.copytree(stage / step_folder(7), stage / step_folder(8))
    set_aside(stage / step_folder(8))
    code, checks = report(capsys, stage)
    assert code == 0
    assert sum(check["state"] == "warning" for check in checks) == 2


def test_a_stage_without_a_sound_checkpoint(stage, capsys):
    for folder in list(stage.iterdir()):
        (folder / "manifest.json").unlink()
    code, checks = report(capsys, stage)
    assert code == 1 and checks[-1]["found"] == "no checkpoint that a resume could take"


def test_a_foreign_file_that_a_reader_would_load(stage, capsys):
    (stage / step_folder(7) / "pytorch_model.bin").write_bytes(b"")
    code, checks = report(capsys, stage / step_folder(7))
    assert code == 1 and "pytorch_model.bin" in checks[0]["found"]


@pytest.mark.parametrize("path", ["missing", "."])
def test_nothing_to_check(path, tmp_path, capsys):
    assert main(["checkpoint", str(tmp_path / path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
