"""
Checkpoints into and out of other layouts.

    python launch/export.py import-published SOURCE TARGET [--config lightninglm-5b] [--tokenizer FOLDER]
    python launch/export.py export-published SOURCE TARGET [--aliases]
    python launch/export.py merge SOURCE TARGET [--dtype bf16] [--verify FILE]

`import-published` makes a checkpoint folder of a published checkpoint: a safetensors file, a folder of shards with
their index, a file of torch.save, or a folder with one such file per expert-parallel rank. `export-published` goes
back; what was imported comes out bit for bit. docs/published-checkpoints.md says what is held where.

`merge` makes dense experts of quantized experts and their adapters: the matrices that were trained, in fp32 or rounded
once to bf16. It is the growth operator merge_experts, and the target has a growth receipt.

Exit codes: 0 done, 1 an exported tensor is not what was imported or a merged model computes something else, 2 bad usage
or input. With --json one JSON object goes to standard output; everything else goes to standard error.
"""

import argparse
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from growth.core import grow
from growth.errors import GrowthError, ReceiptError
from growth.merge_experts import DTYPES
from growth.progress import transfer_bar
from growth.receipt import RECEIPT_FILE
from lightninglm.checkpoint import CheckpointError, CheckpointReader
from lightninglm.checkpoint.published import (
    ExportMismatchError,
    PublishedSource,
    export_published,
    import_published,
    resolve_config,
)
from lightninglm.modeling.presets import PRESETS


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = _parser().parse_args(arguments)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    try:
        args.run(args, console)
    except (CheckpointError, GrowthError) as error:
        console.print("error:", str(error), markup=False)
        return 1 if isinstance(error, ExportMismatchError | ReceiptError) else 2
    except KeyboardInterrupt:
        console.print("interrupted: nothing was written")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = _add_command(commands, "import-published", _import, "make a checkpoint folder of a published checkpoint")
    command.add_argument(
        "--config", metavar="PRESET|FILE", help=f"JSON file or one of {', '.join(PRESETS)} (default: by the sizes)"
    )
    command.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="copy the tokenizer of this folder")
    command.add_argument(
        "--ignore-stale-aliases", action="store_true", help="take the canonical tensor where an alias holds another one"
    )
    command.add_argument(
        "--recompute-rope", action="store_true", help="let a --config with rope_source 'config' replace the frequencies"
    )
    command = _add_command(commands, "export-published", _export, "write a checkpoint folder in the published layout")
    command.add_argument("--aliases", action="store_true", help="write every tensor under all its names (4x the size)")
    command = _add_command(commands, "merge", _merge, "make dense experts of quantized experts and their adapters")
    command.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the merged weights (default fp32)")
    command.add_argument("--verify", type=Path, metavar="FILE", help="held-out tokens to measure both models on")
    return parser


def _add_command(commands, name: str, run, about: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=about, description=about)
    command.set_defaults(run=run)
    command.add_argument("source", type=Path, metavar="SOURCE")
    command.add_argument("target", type=Path, metavar="TARGET", help="folder to create")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    return command


def _import(args: argparse.Namespace, console: Console) -> None:
    source = PublishedSource(args.source)
    config = resolve_config(source, args.config)
    report = import_published(
        source,
        args.target,
        config,
        tokenizer_folder=args.tokenizer,
        ignore_stale_aliases=args.ignore_stale_aliases,
        recompute_rope=args.recompute_rope,
        progress=lambda total: transfer_bar(total, f"import -> {args.target.name}", not args.json),
    )
    if args.json:
        print(json.dumps(asdict(report), indent=2))
        return
    for alias in report.stale_aliases:
        console.print("ignored:", alias, "(does not hold what its canonical key holds)", markup=False)
    for entry in report.ignored:
        console.print("ignored:", entry, "(not a tensor)", markup=False)
    for note in report.notes:
        console.print("note:", note, markup=False)
    keys = f"{report.keys:,} published keys (and {report.aliases:,} aliases)"
    console.print(f"{keys} -> {report.tensors:,} tensors in {args.target}")
    if args.tokenizer is None:
        console.print("note: without --tokenizer the folder has no tokenizer.json, the model needs load_token_bytes")


def _export(args: argparse.Namespace, console: Console) -> None:
    report = export_published(
        args.source,
        args.target,
        aliases=args.aliases,
        progress=lambda total: transfer_bar(total, f"export -> {args.target.name}", not args.json),
    )
    if args.json:
        print(json.dumps(asdict(report), indent=2))
        return
    for note in report.notes:
        console.print("note:", note, markup=False)
    checked = "" if report.as_imported is None else f", {report.as_imported:,} bit for bit as imported"
    console.print(f"{report.keys:,} published keys{checked}, and {report.aliases:,} aliases in {args.target}")


def _merge(args: argparse.Namespace, console: Console) -> None:
    with CheckpointReader(args.source) as reader:
        has_optimizer = bool(reader.optimizer)
    receipt = grow(
        args.source,
        args.target,
        "merge_experts",
        {"dtype": args.dtype},
        stage=args.target.name,
        heldout=args.verify,
        moments=has_optimizer,
        progress=not args.json,
    )
    if args.json:
        print(json.dumps(receipt, indent=2))
        return
    merged = receipt["tensors"]["by_kind"]["merged"]
    console.print(f"{merged:,} matrices merged: {args.target} (receipt: {RECEIPT_FILE})")
    if receipt["measured"] is not None:
        console.print(f"relative logit difference {receipt['measured']['logits']['relative']:.1e}")


if __name__ == "__main__":
    sys.exit(main())
