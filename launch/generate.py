"""
Continue a text with a trained checkpoint.

    python launch/generate.py runs/tiny/experts/step-00000196 "def main():" --max-new-tokens 40

The folder is an ordinary HuggingFace checkpoint; this does what `AutoModelForCausalLM` and `generate` do.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lightninglm.modeling  # noqa: F401  registers the model with the Auto classes
from lightninglm.checkpoint import CheckpointError, CheckpointReader


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint")
    parser.add_argument("prompts", nargs="+", help="one or more texts to continue, as one batch")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        CheckpointReader(args.checkpoint)  # a damaged folder is refused before anything is loaded
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint, padding_side="left")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint).to(device)
    inputs = tokenizer(args.prompts, return_tensors="pt", padding=True, return_token_type_ids=False).to(device)
    torch.manual_seed(args.seed)
    sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p} if args.temperature else {}
    tokens = model.generate(**inputs, max_new_tokens=args.max_new_tokens, **sampling)
    for text in tokenizer.batch_decode(tokens, skip_special_tokens=True):
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
