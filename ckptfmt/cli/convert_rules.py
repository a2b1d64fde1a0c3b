"""Rules on the command line of `convert`, what they would do, and the table of what was done."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckptfmt.cli.table import Column, Table
from ckptfmt.cli.text import format_count

if TYPE_CHECKING:
    from ckptfmt.reports import ConvertReport, RuleChange


class _AddRule(argparse.Action):
    """--rename, --map and --preset make one list, in the order of the command line."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        rows = [*(getattr(namespace, self.dest) or [])]
        if option_string == "--rename":
            # The last =: a pattern may have some ((?=...)), a name hardly ever does.
            pattern, found, template = str(values).rpartition("=")
            if not found:
                parser.error(f"--rename {values}: expected REGEX=TEMPLATE")
            rows.append({"rename": pattern, "to": template})
        else:
            rows.append({(option_string or "").lstrip("-"): values})
        setattr(namespace, self.dest, rows)


def add_rule_arguments(parser: argparse.ArgumentParser) -> None:
    rules = parser.add_argument_group("rules, applied in the order given")
    for option, metavar, what in (
        ("--rename", "REGEX=TEMPLATE", "rename leaves; the template may have \\1; repeatable"),
        ("--map", "FILE.toml", "rules from a file; repeatable"),
        ("--preset", "NAME", "keras-to-torch, torch-to-keras, bert-tf1-to-hf"),
    ):
        rules.add_argument(option, dest="rules", action=_AddRule, metavar=metavar, help=what)
    rules.add_argument(
        "--layer",
        action="append",
        default=[],
        metavar="REGEX=KIND",
        help="for --preset: what a layer or an optimizer is, where its names do not say",
    )
    rules.add_argument(
        "--plan", action="store_true", help="show what the rules match; writes nothing"
    )


def rules_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows that the options are. UsageError: --layer without --preset, or no KIND."""
    from ckptfmt.errors import UsageError

    rows: list[dict[str, Any]] = args.rules or []
    layers = {}
    for text in args.layer:
        # The first =: a kind may have some (num_heads=8), a layer's name hardly ever does.
        pattern, found, kind = text.partition("=")
        if not found or not kind:
            raise UsageError(
                "--layer is not understood",
                reason="arguments",
                found=text,
                expected="REGEX=KIND: 'attn$=MultiheadAttention(num_heads=8)'",
            )
        layers[pattern] = kind
    presets = [row for row in rows if "preset" in row]
    if layers and not presets:
        raise UsageError(
            "--layer is for --preset", reason="arguments", do="add --preset, or put it into --map"
        )
    for row in presets:
        if layers:
            row["layers"] = layers
    return rows


def plan_table(report: ConvertReport) -> Table:
    """What each rule matches, and what becomes of it."""
    table = Table(
        [
            Column("RULE", right=True),
            Column("NAME", shrink_to=16, middle=True, keep=True),
            Column("WAS", shrink_to=14),
            Column("BECOMES", shrink_to=16, middle=True, keep=True),
            Column("NOW", shrink_to=14),
        ]
    )
    for number, rule in enumerate(report.rules, 1):
        for change in rule.changes:
            for row in _rows(change):
                table.add(str(number), *row)
    return table


def _rows(change: RuleChange) -> Sequence[tuple[str, str, str, str]]:
    """A line for each name: what came from what is side by side."""
    gone = [("(dropped)", "")] if not change.after else []
    before = list(zip(change.before, change.was))
    after = [*zip(change.after, change.now), *gone]
    length = max(len(before), len(after))
    before += [("", "")] * (length - len(before))
    after += [("", "")] * (length - len(after))
    rows = []
    for (name, was), (becomes, now) in zip(before, after):
        rows.append((name, was, becomes if becomes != name else "", now if now != was else ""))
    return rows


def rule_table(report: ConvertReport) -> Table:
    table = Table(
        [Column("RULE", right=True), Column("WHAT", shrink_to=20), Column("TOUCHED", right=True)]
    )
    for number, rule in enumerate(report.rules, 1):
        table.add(str(number), rule.rule, f"{rule.touched:,}")
    return table


def count_table(report: ConvertReport) -> Table:
    """How many leaves were carried, and how; where little is to be said, all of it."""
    table = Table([Column("RESULT"), Column("COUNT", right=True), Column("WHICH", shrink_to=20)])
    for label, found in (
        ("loaded", report.loaded),
        ("renamed", report.renamed),
        ("transformed", report.transformed),
        ("dropped", report.dropped),
        ("skipped", report.skipped),
        ("opaque", report.opaque),
    ):
        if label == "loaded" or found:
            table.add(label, f"{len(found):,}", _first(list(found)))
    return table


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(name or "(root)" for name in names[:3]) + more


def detail_table(report: ConvertReport) -> Table:
    """Every leaf that is not simply the same: for -v."""
    table = Table(
        [
            Column("RESULT"),
            Column("NAME", shrink_to=20, middle=True, keep=True),
            Column("HOW", shrink_to=20, middle=True),
        ]
    )
    for label, found in (
        ("renamed", report.renamed),
        ("transformed", report.transformed),
        ("dropped", report.dropped),
        ("skipped", report.skipped),
        ("opaque", report.opaque),
    ):
        for name, how in found.items():
            table.add(label, name or "(root)", how)
    return table


def summary(report: ConvertReport) -> str:
    touched = sum(rule.touched for rule in report.rules)
    return (
        f"{format_count(len(report.loaded), 'tensor')}; "
        f"{format_count(len(report.rules), 'rule')} would touch {format_count(touched, 'leaf')}"
    ).replace("leafs", "leaves")
