"""
Grows a checkpoint into a larger one, checks a grown one, and lists what differs between two (docs/growth.md).

    python -m growth OPERATOR --source CKPT --target DIR [--verify FILE] [--dry-run] [options of the operator]
    python -m growth verify SOURCE TARGET [--batches FILE]
    python -m growth diff SOURCE TARGET

CKPT, SOURCE and TARGET are checkpoint folders (step-00001000), FILE the held-out tokens of prepared data. Exit codes: 0
done, 1 a check failed (receipt, verification), 2 bad usage or input, 130 interrupted; OPERATOR makes DIR only with 0.
With --json one JSON object goes to standard output; everything else goes to standard error.
"""

import argparse
import inspect
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from growth.core import grow
from growth.errors import GrowthError, ReceiptError
from growth.job import OPERATORS, GrowthJob, parse_options, plan_growth, tensor_sha256
from growth.receipt import RECEIPT_FILE
from growth.verify import diff, grouped, verify
from lightninglm.checkpoint import CheckpointError, CheckpointReader, parse_step
from lightninglm.checkpoint.errors import free_bytes
from lightninglm.checkpoint.writer import SHARD_BYTES, refuse_existing

PROBE_BYTES = 64 * 2**20  # read from the source to estimate how long a growth takes


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = _parser().parse_args(arguments)
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    try:
        return args.run(args, console)
    except ReceiptError as error:
        if args.json:
            print(json.dumps(error.receipt, indent=2))
        console.print(f"[red]failed:[/red] {error}", highlight=False)
        return 1
    except (GrowthError, CheckpointError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted: the source is untouched and no target was made; start again to grow it")
        return 130


def _parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m growth", description=__doc__, formatter_class=plain)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (options, plan) in OPERATORS.items():
        about = inspect.getmodule(plan).__doc__.partition(": ")[2]
        command = commands.add_parser(
            name,
            help=about.split("\n\n")[0],
            description=about,
            epilog=f"options of {name}:\n{inspect.getdoc(options)}",
            formatter_class=plain,
        )
        command.set_defaults(run=_grow, operator=name)
        command.add_argument("--source", type=Path, required=True, metavar="CKPT", help="checkpoint folder to grow")
        command.add_argument("--target", type=Path, required=True, metavar="DIR", help="folder to create")
        command.add_argument("--verify", type=Path, metavar="FILE", help="held-out tokens to measure both models on")
        command.add_argument("--stage", metavar="NAME", help="stage that will train the target (default: its folder's)")
        command.add_argument("--seed", type=int, default=0, help="of everything drawn at random (default 0)")
        command.add_argument("--drop-moments", action="store_true", help="start the target with a fresh Adam state")
        command.add_argument("--dry-run", action="store_true", help="print what would be written, write nothing")
        command.add_argument("--json", action="store_true", help="print the receipt as JSON")
        _add_options(command, options)
    command = commands.add_parser("verify", help="check a grown checkpoint against its source, every tensor")
    command.description = (
        "Hashes every byte of both checkpoints, makes every tensor of the target again as its receipt says, compares "
        "configuration, tokenizer and trainer state, and with --batches measures both models, one layer in memory at a "
        "time. Prints every difference by the tensor's name."
    )
    command.set_defaults(run=_verify)
    command.add_argument("--batches", type=Path, metavar="FILE", help="held-out tokens to measure both on")
    _add_pair(command)
    command = commands.add_parser("diff", help="list which tensors of two checkpoints differ, and by how much")
    command.description = (
        "Compares tensors by name, optimizer state included: identical, changed (with the largest absolute change), "
        "reshaped, new or removed. --json lists every tensor with its SHA-256 and, where the source holds the same "
        "bytes under another name, that name."
    )
    command.set_defaults(run=_diff)
    _add_pair(command)
    return parser


def _add_pair(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", type=Path, metavar="SOURCE", help="checkpoint folder")
    command.add_argument("target", type=Path, metavar="TARGET", help="checkpoint folder that was grown from it")
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_options(command: argparse.ArgumentParser, options: type[BaseModel]) -> None:
    """One argument per field of an options class; absent ones keep the class's default."""
    for name, field in options.model_fields.items():
        kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not type(None)]
        flag, kind = "--" + name.replace("_", "-"), field.annotation
        settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
        if field.description:
            settings["help"] = field.description
        elif not field.is_required() and field.default not in (None, False):
            settings["help"] = f"default {field.default}"
        if kind is bool:
            settings["action"] = "store_true"
        elif get_origin(kind) is Literal or get_origin(kinds[0]) is Literal:
            settings["choices"] = get_args(kind) if get_origin(kind) is Literal else get_args(kinds[0])
        elif get_origin(kind) is list:
            settings |= {"type": int, "nargs": "+"}
        else:
            settings |= {"type": _scalar(kinds[0]), "metavar": name.upper()}
        command.add_argument(flag, required=field.is_required(), **settings)


def _scalar(kind: Any) -> type:
    return kind if kind in (int, float, str) else get_args(kind)[0]


def _grow(args: argparse.Namespace, console: Console) -> int:
    options = {name: getattr(args, name) for name in OPERATORS[args.operator][0].model_fields if hasattr(args, name)}
    if args.dry_run:
        return _dry_run(args, options, console)
    stage_folder = args.target if parse_step(args.target.name) is None else args.target.absolute().parent
    receipt = grow(
        args.source,
        args.target,
        args.operator,
        options,
        stage=args.stage or stage_folder.name,
        seed=args.seed,
        heldout=args.verify,
        moments=not args.drop_moments,
    )
    if args.json:
        print(json.dumps(receipt, indent=2))
    else:
        console.print(receipt_table(receipt))
    console.print(f"written to {args.target} (receipt: {RECEIPT_FILE})", highlight=False, soft_wrap=True)
    return 0


def _dry_run(args: argparse.Namespace, options: dict[str, Any], console: Console) -> int:
    refuse_existing(args.target)
    with CheckpointReader(args.source) as reader:
        parsed = parse_options(args.operator, options)
        job = plan_growth(reader, args.operator, parsed, seed=args.seed, moments=not args.drop_moments)
        size, read = job.bytes_to_write(), job.bytes_to_read()
        weights = job.weight_bytes()
        kinds = [origin.kind for origin in job.plan.origins.values()]
        result = {
            "operator": args.operator,
            "options": parsed.model_dump(),
            "tensors_by_kind": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "shards": -(-weights // SHARD_BYTES) + -(-(size - weights) // SHARD_BYTES),
            "bytes_to_read": read,
            "bytes_to_write": size,
            "bytes_free": free_bytes(args.target),
            "expected_seconds": round((read + size) / _bytes_per_second(job), 1),
        }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        table = Table("dry run of", args.operator)
        for key, value in result.items():
            table.add_row(key, f"{value:,}" if isinstance(value, int | float) else str(value))
        console.print(table)
    return 0


def _bytes_per_second(job: GrowthJob) -> float:
    """How fast a piece of the source is read and hashed here, the two things that a growth does to every byte."""
    started, seen = time.monotonic(), 0
    for name in job.reader.weights:
        tensor = job.reader.read(name)
        tensor_sha256(tensor)
        seen += tensor.nbytes
        if seen > PROBE_BYTES:
            break
    return seen / max(time.monotonic() - started, 1e-6)


def receipt_table(receipt: dict[str, Any]) -> Table:
    """The main numbers of a receipt."""
    table = Table("growth", f"{receipt['operator']}, {receipt['strategy']}")
    tensors, parameters = receipt["tensors"], receipt["parameters"]
    counts = ", ".join(f"{tensors[key]:,} {key}" for key in ("identical", "derived", "new"))
    table.add_row("tensors", counts)
    for key in ("stored", "active"):
        table.add_row(f"{key} parameters", f"{parameters['before'][key]:,} -> {parameters['after'][key]:,}")
    moments = receipt["moments"]
    carried = f"carried for {moments['parameters_carried']:,} parameters" if moments["carried"] else "dropped"
    table.add_row("Adam's moments", carried)
    if receipt["measured"] is not None:
        for row in measurement_rows(receipt["measured"], receipt["tolerance"]):
            table.add_row(*row)
    return table


def measurement_rows(measured: dict[str, Any], tolerance: dict[str, Any]) -> list[tuple[str, str]]:
    """What was measured, for a table."""
    logits, allowed = measured["logits"], tolerance["relative_logit_difference"]
    declared = f"allowed {allowed:.0e}" if allowed is not None else "nothing promised"
    rows = []
    if logits["relative"] is not None:
        rows.append(("relative logit difference", f"{logits['relative']:.2e} ({declared})"))
        rows.append(("largest logit difference", f"{logits['max_absolute']:.2e}"))
    if logits["second_token_relative"] is not None:
        rows.append(("relative, second token", f"{logits['second_token_relative']:.2e}"))
    for domain, loss in measured["heldout"].items():
        change = f"{loss['before']:.6f} -> {loss['after']:.6f} {measured['unit']}"
        rows.append((f"held-out loss, {domain}", change))
    return rows


def _verify(args: argparse.Namespace, console: Console) -> int:
    result = verify(args.source, args.target, args.batches)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        for finding in result["findings"]:
            text = f"{finding['tensor']}: found {finding['found']}, expected {finding['expected']}"
            console.print(text, highlight=False, soft_wrap=True)
        if result["measured"] is not None:
            table = Table("measured", "")
            for row in measurement_rows(result["measured"], result["tolerance"]):
                table.add_row(*row)
            console.print(table)
        if not result["replayed"]:
            console.print(f"the target has no {RECEIPT_FILE}: there is no growth to replay")
        console.print("[green]passed[/green]" if result["passed"] else "[red]failed[/red]")
    return 0 if result["passed"] else 1


def _diff(args: argparse.Namespace, console: Console) -> int:
    result = diff(args.source, args.target)
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    table = Table("tensor", "status", "tensors", "largest change")
    for name, status, count, change in grouped([row for row in result["tensors"] if row["status"] != "identical"]):
        table.add_row(name, status, f"{count:,}", "" if change is None else f"{change:.2e}")
    output = Console()
    output.print(table)
    output.print(", ".join(f"{count:,} {status}" for status, count in result["counts"].items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
