"""
Held-out loss per domain of a checkpoint.

    python launch/evaluate.py runs/tiny/experts/step-00000196 --heldout runs/tiny/data/heldout-128.safetensors
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file

from lightninglm.checkpoint import CheckpointError, CheckpointReader
from lightninglm.modeling import LightningLMForCausalLM
from lightninglm.training.evaluate import heldout_loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint")
    parser.add_argument("--heldout", type=Path, required=True, help="safetensors file: domain -> int32 [n, S]")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences per forward pass")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    try:
        CheckpointReader(args.checkpoint)
        heldout = load_file(args.heldout)
    except (CheckpointError, FileNotFoundError, SafetensorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LightningLMForCausalLM.from_pretrained(args.checkpoint).to(device)
    losses = heldout_loss(model, heldout, micro_batch=args.micro_batch, device=device)
    if args.json:
        print(json.dumps({"checkpoint": str(args.checkpoint), "heldout": losses}))
        return 0
    table = Table("domain", "nats per token", title=str(args.checkpoint))
    for domain, loss in losses.items():
        table.add_row(domain, f"{loss:.4f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
