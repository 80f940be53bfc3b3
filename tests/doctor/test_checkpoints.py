"""`doctor checkpoint`: every damage is named, and what a resume takes is what a resume takes."""

import json
import shutil
from pathlib import Path

import pytest

from launch.doctor import main
from lightninglm.checkpoint import CheckpointWriter, newest_checkpoint, set_aside, step_folder
from lightninglm.checkpoint.layout import decode_head
from tests.checkpoint.checkpoints import CONFIG, STATE, tensors


@pytest.fixture
def stage(tmp_path) -> Path:
    """A stage with two checkpoints, whose start verifies every byte."""
    for step in (3, 7):
        with CheckpointWriter(tmp_path / "run" / "seed" / step_folder(step), shard_bytes=400) as writer:
            for name, tensor in tensors(step).items():
                writer.add(name, tensor)
            writer.commit(CONFIG, STATE | recipe("full") | {"step": step, "finished": step == 7})
    return tmp_path / "run" / "seed"


def recipe(verify: str) -> dict:
    return {"recipe": {"checkpoint": {"verify": verify}}}


def report(capsys, *arguments) -> tuple[int, list[dict]]:
    code = main(["checkpoint", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)["checks"]


@pytest.mark.parametrize("where", ["run", "stage"])
def test_a_sound_stage(stage, where, capsys):
    code, checks = report(capsys, stage if where == "stage" else stage.parent, "--full")
    assert code == 0
    assert [check["state"] for check in checks] == ["ok"] * 3
    assert checks[-1]["found"] == "a resume takes step-00000007: the stage has finished"


def test_what_a_start_checks_itself_is_not_promised_without_full(stage, capsys):
    """A changed byte that fast verification does not see: a start that checks every byte takes an older checkpoint."""
    flip_hidden_byte(write_one_shard(stage, 9, recipe("full")))
    code, checks = report(capsys, stage)
    assert code == 0 and checks[-1]["found"].startswith("a resume takes step-00000009 if every byte of it is sound")
    code, checks = report(capsys, stage, "--full")
    assert code == 1 and checks[-1]["state"] == "ok"
    assert checks[-1]["found"] == (
        "a resume takes step-00000007: the stage has finished; it skips step-00000009 and sets aside what is damaged"
    )
    newest, skipped = newest_checkpoint(stage, "full")
    assert newest.name == "step-00000007" and [one.folder.name for one in skipped] == ["step-00000009"]


def flip_hidden_byte(checkpoint: Path) -> str:
    """Changes a byte of a tensor that is not in the sample; returns the tensor's name."""
    path, name = checkpoint / "model-00000-00000.safetensors", "model.layers.1.mlp.experts.2.up_proj.weight"
    head, start = decode_head(path)
    content = bytearray(path.read_bytes())
    content[start + head[name]["data_offsets"][0]] ^= 1
    path.write_bytes(content)
    return name


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[position_in_smallest(path) if path.suffix == ".safetensors" else -1] ^= 1
        path.write_bytes(content)


def position_in_smallest(shard: Path) -> int:
    """A byte of a tensor that a resume looks at too."""
    head, start = decode_head(shard)
    spans = [entry["data_offsets"] for entry in head.values() if entry["data_offsets"][1] > entry["data_offsets"][0]]
    return start + min(spans, key=lambda span: span[1] - span[0])[0]


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


def write_one_shard(stage: Path, step: int, state: dict) -> Path:
    with CheckpointWriter(stage / step_folder(step)) as writer:
        for name, tensor in tensors(step).items():
            writer.add(name, tensor)
        return writer.commit(CONFIG, STATE | {"step": step} | state)


def test_damage_that_a_resume_does_not_see_is_said_to_be_taken(stage, capsys):
    """A fast start samples two tensors of a shard; the doctor names the tensor and how to have another one taken."""
    name = flip_hidden_byte(write_one_shard(stage, 9, recipe("fast")))
    code, checks = report(capsys, stage)
    assert code == 0 and checks[-1]["found"] == "a resume takes step-00000009: goes on after step 9"
    code, checks = report(capsys, stage, "--full")
    assert code == 1 and f"changed bytes in {name} " in checks[-2]["found"]
    assert checks[-1]["state"] == "problem" and "a resume takes step-00000009" in checks[-1]["found"]
    assert checks[-1]["advice"].startswith("mv ")


@pytest.mark.parametrize("how", ["delete", "truncate"])
def test_the_tensors_that_are_lost_are_named(stage, how, capsys):
    path = write_one_shard(stage, 9, {}) / "optimizer-00000-00000.safetensors"
    last = max(decode_head(path)[0].items(), key=lambda entry: entry[1]["data_offsets"][1])[0]
    stored = [*decode_head(path)[0]]
    if how == "delete":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    _, checks = report(capsys, stage / step_folder(9))
    lost = f"(lost: {last})" if how == "truncate" else f"and {len(stored) - 3} more)"
    assert lost in checks[0]["found"]


def test_bases_that_the_adapters_were_not_trained_on(stage, capsys):
    write_one_shard(stage, 9, {"expert_bases": {"model.layers.0.mlp.experts": "0" * 64}})
    code, checks = report(capsys, stage)
    assert code == 1 and "trained on another quantized base" in checks[-2]["found"]
    assert checks[-1]["state"] == "problem"


def test_a_folder_without_commit_marker(stage, capsys):
    (stage / step_folder(7) / "manifest.json").unlink()
    _, checks = report(capsys, stage / step_folder(7))
    assert "not a complete checkpoint" in checks[0]["found"]


def test_a_stage_that_has_only_begun_to_save(tmp_path, capsys):
    (tmp_path / "seed" / ".tmp-step-00000003").mkdir(parents=True)
    code, checks = report(capsys, tmp_path)
    assert code == 0 and checks[-1]["found"] == "no checkpoint yet"


def test_what_killed_runs_leave_is_explained(stage, capsys):
    shutil.copytree(stage / step_folder(7), stage / ".tmp-step-00000009")
    shutil.copytree(stage / step_folder(3), stage / ".tmp-grow-1-stack_layers")
    shutil.copytree(stage / step_folder(7), stage / step_folder(8))
    set_aside(stage / step_folder(8))
    code, checks = report(capsys, stage)
    assert code == 0
    warnings = [check for check in checks if check["state"] == "warning"]
    assert [Path(check["name"]).name for check in warnings] == [
        ".tmp-grow-1-stack_layers", ".tmp-step-00000009", "damaged-step-00000008",
    ]  # fmt: skip
    assert "growth" in warnings[0]["found"] and "resume" in warnings[2]["found"]


def test_a_stage_of_which_no_checkpoint_is_whole_to_the_byte(tmp_path, capsys):
    flip_hidden_byte(write_one_shard(tmp_path / "seed", 9, {}))
    code, checks = report(capsys, tmp_path, "--full")
    assert code == 1 and checks[-1]["found"] == "no checkpoint that a resume could take"


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
