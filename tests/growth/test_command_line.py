"""`python -m growth`: exit codes, machine-readable output, dry runs."""

import json

import pytest

from growth.__main__ import main
from growth.job import OPERATORS
from lightninglm.checkpoint import CheckpointReader


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_grow_verify_and_diff(dense, tmp_path, heldout, capsys):
    target = tmp_path / "moe" / "step-00000000"
    grow = ("dense_to_moe", "--source", dense, "--target", target, "--num-experts", 4, "--experts-per-token", 2)
    code, out, err = run(capsys, *grow, "--verify", heldout, "--seed", 5, "--json")
    receipt = json.loads(out)
    assert code == 0 and "written to" in err
    assert (receipt["operator"], receipt["strategy"], receipt["seed"], receipt["passed"]) == (
        "dense_to_moe",
        "exact",
        5,
        True,
    )
    assert receipt["stage"] == CheckpointReader(target).trainer_state["stage"] == "moe"
    assert receipt == json.loads((target / "growth_receipt.json").read_text())

    code, out, _ = run(capsys, "verify", dense, target, "--batches", heldout, "--json")
    assert code == 0 and json.loads(out)["passed"]
    code, out, _ = run(capsys, "diff", dense, target, "--json")
    assert code == 0 and json.loads(out)["counts"]["identical"] > 100
    code, out, _ = run(capsys, "diff", dense, target)
    assert code == 0 and "identical" in out


def test_a_missed_tolerance_is_exit_code_1_with_the_receipt(mixture, tmp_path, heldout, capsys):
    arguments = ("--source", mixture, "--target", tmp_path / "t", "--num-experts", 12, "--strategy", "duplicate")
    code, out, err = run(capsys, "multiply_experts", *arguments, "--tolerance", 1e-6, "--verify", heldout, "--json")
    assert code == 1 and "missed its tolerance" in err.replace("\n", " ")
    assert json.loads(out)["passed"] is False
    assert not (tmp_path / "t").exists()


def test_a_failed_verification_is_exit_code_1(dense, mixture, tmp_path, capsys):
    target = tmp_path / "t"
    assert run(capsys, "dense_to_moe", "--source", dense, "--target", target, "--num-experts", 4)[0] == 0
    code, out, err = run(capsys, "verify", mixture, target)
    assert code == 1 and out == "" and "from which the target was grown" in err


def test_bad_input_is_exit_code_2(dense, tmp_path, capsys):
    code, out, err = run(capsys, "dense_to_moe", "--source", dense, "--target", tmp_path / "t", "--num-experts", 1)
    assert code == 2 and out == "" and "num_experts" in err
    code, _, err = run(
        capsys, "deepen", "--source", dense, "--target", tmp_path / "t", "--source-layers", 0, 1, 2, 3, 0
    )
    assert code == 2 and "even" in err
    with pytest.raises(SystemExit) as usage:
        main(["dense_to_moe", "--source", str(dense)])
    assert usage.value.code == 2


def test_a_dry_run_writes_nothing(mixture, tmp_path, capsys):
    arguments = ("multiply_experts", "--source", mixture, "--target", tmp_path / "t", "--num-experts", 12)
    code, out, _ = run(capsys, *arguments, "--dry-run", "--json")
    planned = json.loads(out)
    assert code == 0 and list(tmp_path.iterdir()) == []
    assert run(capsys, *arguments, "--json")[0] == 0
    tensors = CheckpointReader(tmp_path / "t").manifest["tensors"]
    itemsize = {"F32": 4, "BF16": 2}
    written = 0
    for entry in tensors.values():
        count = itemsize[entry["dtype"]]
        for size in entry["shape"]:
            count *= size
        written += count
    assert planned["bytes_to_write"] == written
    assert sum(planned["tensors_by_kind"].values()) == len(CheckpointReader(tmp_path / "t").weights)


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_explains_its_options(operator, capsys):
    with pytest.raises(SystemExit) as done:
        main([operator, "--help"])
    assert done.value.code == 0
    help_text = capsys.readouterr().out
    for name in OPERATORS[operator][0].model_fields:
        assert "--" + name.replace("_", "-") in help_text
