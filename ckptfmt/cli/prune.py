"""`ckptfmt prune STORE`: delete what no rule keeps, and say why."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Literal

from ckptfmt.cli.exit_codes import OK
from ckptfmt.cli.output import Output
from ckptfmt.cli.table import Column, Table
from ckptfmt.cli.text import format_count

if TYPE_CHECKING:
    from ckptfmt.manager import Keep

DESCRIPTION = """\
Delete the checkpoints that none of the rules keeps. Never deleted: the
newest, a tagged one, one that no Manager wrote (see ckptfmt rm). Nothing
goes before a newer checkpoint was read and verified. What is set aside (see
ckptfmt ls --quarantined) goes by --keep-quarantined alone."""
EPILOG = """\
examples:
  ckptfmt prune runs/a --keep-last 3 --explain   what would go, and why
  ckptfmt prune runs/a --keep-last 3 --keep-best val_loss
  ckptfmt prune runs/a --keep-best acc:2:max --keep-every-steps 1000
  ckptfmt prune runs/a --keep-quarantined 0 --quarantined-days 30 --explain"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="directory or URL")
    parser.add_argument("--keep-last", type=int, metavar="N", help="the newest N")
    parser.add_argument(
        "--keep-every-steps", type=int, metavar="N", help="the first of each N steps"
    )
    parser.add_argument(
        "--keep-every-hours", type=float, metavar="H", help="the first of each H hours"
    )
    parser.add_argument(
        "--keep-best",
        action="append",
        default=[],
        metavar="METRIC[:N[:max]]",
        help="the best N (default 1) by a metric, the smallest unless max; may be repeated",
    )
    parser.add_argument(
        "--keep-quarantined",
        type=int,
        metavar="N",
        help="of those set aside only the newest N; alone it leaves the others alone",
    )
    parser.add_argument(
        "--quarantined-days",
        type=float,
        metavar="D",
        help="besides, those set aside that were made less than D days ago",
    )
    parser.add_argument(
        "--explain",
        "--dry-run",
        action="store_true",
        dest="dry_run",
        help="change nothing: a reason for each checkpoint",
    )


def run(args: argparse.Namespace, out: Output) -> int:
    from ckptfmt.cli.where import open_whole_store
    from ckptfmt.manager import Manager

    policy = _policy(args)
    store = open_whole_store(args, read_only=args.dry_run)
    with Manager(store, keep=policy) as manager:
        decisions = manager.prune(dry_run=args.dry_run)
    table = Table(
        [
            Column("CHECKPOINT", shrink_to=12, middle=True, keep=True),
            Column("DECISION"),
            Column("REASON", shrink_to=20),
        ]
    )
    goes = "would go" if args.dry_run else "deleted"
    for decision in decisions:
        table.add(
            str(decision.step) if decision.step is not None else decision.name,
            ("waits" if decision.waits else "kept") if decision.kept else goes,
            decision.reason,
        )
    document = {
        "command": "prune",
        "url": store.url,
        "dry_run": args.dry_run,
        "decisions": [
            {
                "name": decision.name,
                "step": decision.step,
                "kept": decision.kept,
                "waits": decision.waits,
                "quarantined": decision.quarantined,
                "reason": decision.reason,
            }
            for decision in decisions
        ],
    }
    out.result(document, *([table] if decisions else []))
    if not decisions:
        out.note(f"no checkpoint in {store.url}")
    waiting = sum(decision.waits for decision in decisions)
    if waiting and args.dry_run:
        out.note(
            f"{format_count(waiting, 'checkpoint')} would go once the newest is verified, which "
            "prune does before it deletes"
        )
    elif any(not decision.kept for decision in decisions):
        out.note(f"the space comes back by: ckptfmt gc {store.url}")
    return OK


def _policy(args: argparse.Namespace) -> Keep:
    from ckptfmt.errors import UsageError
    from ckptfmt.manager import keep

    rules = [_best(text) for text in args.keep_best]
    if args.keep_last is not None:
        rules.append(keep.last(args.keep_last))
    if args.keep_every_steps is not None:
        rules.append(keep.every(steps=args.keep_every_steps))
    if args.keep_every_hours is not None:
        rules.append(keep.every(hours=args.keep_every_hours))
    if args.keep_quarantined is not None or args.quarantined_days is not None:
        number, days = args.keep_quarantined or 0, args.quarantined_days or 0.0
        rules.append(keep.quarantined(number, days=days))
    if not rules:
        raise UsageError(
            "nothing says what to keep",
            reason="keep",
            do="give a rule or more, for example --keep-last 3",
        )
    policy = rules[0]
    for rule in rules[1:]:
        policy = policy | rule
    return policy


def _best(text: str) -> Keep:
    from ckptfmt.errors import UsageError
    from ckptfmt.manager import keep

    metric, *rest = text.split(":")
    mode: Literal["min", "max"] = "max" if rest[-1:] == ["max"] else "min"
    numbers = [part for part in rest if part not in ("min", "max")]
    if len(numbers) > 1 or not all(part.isdigit() for part in numbers):
        raise UsageError(
            "no metric to keep the best by",
            reason="keep",
            expected="METRIC, METRIC:N or METRIC:N:max",
            found=repr(text),
            do="for example --keep-best val_loss:2",
        )
    return keep.best(metric, int(numbers[0]) if numbers else 1, mode)
