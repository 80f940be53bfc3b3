"""The written rule of what happens to optimizer state, per kind of tensor.

An operator says of which kind each target tensor is; this table says what that means for the fp32 master weight and for
Adam's two moments. `docs/growth.md` and every receipt print the same table.

A clone under a grouped router sees about k_m / M of its parent's tokens with weight about 1 / k_m, so its gradient is
about 1 / M of the parent's: exp_avg / M and exp_avg_sq / M^2 leave Adam's normalised step unchanged. Adam's step
count is kept, so that bias correction stays 1; parameters without moments get a warm-up of their own
(`trainer_state["new_tensors"]`).
"""

from dataclasses import dataclass

MASTER, EXP_AVG, EXP_AVG_SQ = "master", "exp_avg", "exp_avg_sq"
OPTIMIZER_PARTS = (MASTER, EXP_AVG, EXP_AVG_SQ)
NEW_TENSOR_WARMUP_STEPS = 100


@dataclass(frozen=True)
class MomentRule:
    """
    One row of the table: three phrases for people, and what the code does with them.

    `carries`: the moments come from the source (through `Origin.carry`, divided by M and M^2); otherwise they are zero.
    `identical`: the target tensor holds the very bits of a source tensor. `new`: it owes no value to the source.
    """

    master: str
    exp_avg: str
    exp_avg_sq: str
    carries: bool = False
    identical: bool = False
    new: bool = False


RULES = {
    "copied": MomentRule("copied", "copied", "copied", carries=True, identical=True),
    "clone": MomentRule("copied", "/ M", "/ M^2", carries=True, identical=True),
    "noisy_clone": MomentRule("copied, plus the noise", "/ M", "/ M^2", carries=True),
    "slice": MomentRule("slice", "slice", "slice", carries=True),
    "scaled_slice": MomentRule("slice times a constant", "slice", "slice", carries=True),
    "rows": MomentRule(
        "rows copied, new rows their value", "rows copied, new rows 0", "rows copied, new rows the mean", carries=True
    ),
    "zero": MomentRule("0", "0", "0", new=True),
    "initial": MomentRule("its initial value", "0", "0", new=True),
    "derived": MomentRule("its value", "0", "0"),
    "zero_step_copy": MomentRule("copied", "0", "0", identical=True),
    "merged": MomentRule("W + A B", "0", "0"),
    "quantized": MomentRule("none", "none", "none"),
}


def describe(kinds) -> dict[str, dict[str, str]]:
    """The rows of the table for `kinds`, as plain data for a receipt."""
    return {
        kind: {MASTER: RULES[kind].master, EXP_AVG: RULES[kind].exp_avg, EXP_AVG_SQ: RULES[kind].exp_avg_sq}
        for kind in sorted(set(kinds))
    }
