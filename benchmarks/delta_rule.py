"""
The chunked gated delta rule against the torch fallback of Qwen3-Next in transformers, forward and backward.

    python benchmarks/delta_rule.py [--quick] [--json FILE]

Both compute the same function of the same fp32 tensors, in one process and in turns. Times are medians; "times" is the
median of the ratios of the turns; the spread of ours (distance of the quartiles) is in the JSON. "diff" is the largest
relative difference of the outputs and gradients. Head dim 128 is the published models', 32 that of small models.

On one thread, in processor time: with more threads than idle cores, both would mostly measure waiting.
"""

import statistics
import time
from collections.abc import Callable

import torch
from common import median_and_spread, parse_arguments, report, target
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
from transformers.utils import logging

from lightninglm.modeling.delta_rule import chunk_gated_delta_rule

NUM_HEADS = 4
COLUMNS = {
    "tokens": "len",
    "head_dim": "dim",
    "ours_forward_ms": "ours f",
    "theirs_forward_ms": "HF f",
    "forward_speedup": "times",
    "ours_ms": "ours f+b",
    "theirs_ms": "HF f+b",
    "speedup": "times",
    "difference": "diff",
}


def theirs(q, k, v, log_decay, beta):
    """transformers divides q by sqrt(D), which the caller undoes beforehand."""
    return torch_chunk_gated_delta_rule(q, k, v, g=log_decay, beta=beta, output_final_state=True)


def inputs(tokens: int, head_dim: int) -> list[torch.Tensor]:
    """(q, k, v, log_decay, beta) of one sequence: unit queries and keys, half-lives from one token to a few hundred."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, tokens, NUM_HEADS, head_dim, generator=generator)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    log_decay = -(10 ** (-3 * torch.rand(1, tokens, NUM_HEADS, generator=generator)))
    beta = torch.rand(1, tokens, NUM_HEADS, generator=generator)
    return [x.requires_grad_() for x in (q, k, v, log_decay, beta)]


def run(rule: Callable, tensors: list[torch.Tensor], grad: torch.Tensor):
    """Seconds of processor time for the forward pass and for both passes, and what they computed."""
    start = time.process_time()
    outputs, _ = rule(*tensors)
    forward = time.process_time() - start
    gradients = torch.autograd.grad(outputs, tensors, grad)
    return forward, time.process_time() - start, [outputs.detach(), *gradients]


def compare(tokens: int, head_dim: int, repeats: int) -> dict[str, float]:
    """One row of the table."""
    ours_in = inputs(tokens, head_dim)
    theirs_in = [x.detach() for x in ours_in]
    theirs_in[0] = theirs_in[0] * head_dim**0.5
    theirs_in = [x.requires_grad_() for x in theirs_in]
    grad = torch.randn(ours_in[2].shape, generator=torch.Generator().manual_seed(1))
    times = {"ours_forward": [], "ours": [], "theirs_forward": [], "theirs": []}
    for repeat in range(repeats + 1):
        for name, rule, tensors in (("ours", chunk_gated_delta_rule, ours_in), ("theirs", theirs, theirs_in)):
            forward, both, result = run(rule, tensors, grad)
            if repeat == 0:  # not timed, compared
                if name == "ours":
                    expected = result
                else:
                    result[1] = result[1] * head_dim**0.5
                    difference = max((a - b).norm() / b.norm() for a, b in zip(expected, result, strict=True)).item()
                continue
            times[f"{name}_forward"].append(forward)
            times[name].append(both)

    def speedup(what: str) -> float:
        return statistics.median(b / a for a, b in zip(times[f"ours{what}"], times[f"theirs{what}"], strict=True))

    return {
        "tokens": tokens,
        "head_dim": head_dim,
        **{f"{name}_ms": 1000 * statistics.median(values) for name, values in times.items()},
        "forward_speedup": speedup("_forward"),
        "speedup": speedup(""),
        "spread": median_and_spread(times["ours"])[1],
        "difference": difference,
    }


def main() -> None:
    arguments = parse_arguments(__doc__.strip().splitlines()[0])
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # that transformers runs its fallback is the point
    lengths = (512, 2048) if arguments.quick else (512, 2048, 8192)
    rows = [
        compare(tokens, head_dim, repeats=5 if arguments.quick else max(5, 20480 // tokens))
        for tokens in lengths
        for head_dim in (32, 128)
    ]
    at_2048 = min(row["speedup"] for row in rows if row["tokens"] == 2048)
    slowest = min(min(row["speedup"], row["forward_speedup"]) for row in rows)
    targets = {
        "times faster at 2048 tokens, forward + backward": target(at_2048, 2.0, "higher"),
        "times faster anywhere, forward alone or both": target(slowest, 1.0, "higher"),
    }
    report(
        "Gated delta rule, 4 heads, one thread, ms forward (f) and with backward (f+b)",
        COLUMNS,
        rows,
        targets,
        arguments.json,
    )


if __name__ == "__main__":
    main()
