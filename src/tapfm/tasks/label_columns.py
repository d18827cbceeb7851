"""Choose the targets among the label columns of a cohort table, and the texts of their classes. Nothing is guessed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tapfm.cohort.cohort_table import Cohort, SlideRow
from tapfm.cohort.columns import normalise_column_name, unknown_column_problem
from tapfm.cohort.table_problems import TableProblem
from tapfm.errors import InputError
from tapfm.runtime.messages import format_command_option
from tapfm.tasks.binary_target import BinaryTarget, normalise_label
from tapfm.tasks.catalog import ClassTexts
from tapfm.tasks.target import TargetKind

_NUMBERS = {"0", "1"}
# Fraction of the labels in the two most frequent classes, from which a column may be meant as a binary target. Other
# values may be typing errors, or mean that the label is unknown.
_MIN_IN_TWO_CLASSES = 0.8
_MAX_TEXT = 40  # characters of a value in a message
_MAX_VALUES = 6  # values of a column that are listed; a column with more is summarised
_SCAN_RESOLUTION = "objective"  # a column with the objective of the scanner, never a target


@dataclass(frozen=True)
class TargetRequest:
    """Targets that the user named, and the texts of their classes as far as they are given.

    targets: empty if the target is to be chosen: the only label column with two classes.
    texts: by target and class ("positive", "negative").
    """

    targets: tuple[str, ...] = ()
    texts: ClassTexts = field(default_factory=dict)


def parse_class_options(targets: Sequence[str], positive: Sequence[str], negative: Sequence[str]) -> TargetRequest:
    """Return the request of the options --target, --positive NAME=VALUE and --negative NAME=VALUE.

    Without --target, the columns named by --positive are the targets.
    """
    texts: dict[str, dict[str, list[str]]] = {}
    for option, values in (("positive", positive), ("negative", negative)):
        for value in values:
            name, equals, text = value.partition("=")
            if not (name.strip() and equals and text.strip()):
                raise InputError(
                    f"--{option} {value} does not have the form NAME=VALUE.",
                    hint=f"Name a label column and one of its values, for example: --{option} EGFR="
                    + ("MUT" if option == "positive" else "WT"),
                )
            texts.setdefault(name.strip(), {}).setdefault(option, []).append(text.strip())
    if without := [name for name, each in texts.items() if "positive" not in each]:
        raise InputError(
            f"--negative names {without[0]}, but --positive does not.",
            hint=f"Name the positive class too: --positive {without[0]}=VALUE",
        )
    if targets and (others := [name for name in texts if name not in targets]):
        raise InputError(
            f"--positive names {others[0]}, which is not a target.",
            hint=f"Add it: {format_command_option('--target', others[0])}",
        )
    return TargetRequest(tuple(targets) or tuple(texts), texts)


def find_target_kinds(
    cohort: Cohort, request: TargetRequest, no_target_hint: str = ""
) -> tuple[dict[str, TargetKind], list[TableProblem]]:
    """Return the kind of each target, and the problems of the choice and of all labels."""
    targets, problems = _choose_targets(cohort, request, no_target_hint)
    kinds: dict[str, TargetKind] = {}
    for target in targets:
        if target not in cohort.label_names:
            problems.append(_unknown_target(cohort, target))
            continue
        kinds[target], found = _find_kind(cohort, target, request.texts.get(target, {}))
        problems += found
    return kinds, problems


def _find_target_candidates(cohort: Cohort) -> list[str]:
    """Return the columns that may be a binary target: with 0, 1 and few other values, or almost only two values."""
    found = []
    for name in cohort.label_names:
        values = _group_by_value(cohort, name)
        counts = sorted(map(len, values.values()), reverse=True)
        has_two_classes = len(counts) > 1 and sum(counts[:2]) >= _MIN_IN_TWO_CLASSES * sum(counts)
        few_with_numbers = values.keys() >= _NUMBERS and len(values) <= _MAX_VALUES
        if normalise_column_name(name) != _SCAN_RESOLUTION and (has_two_classes or few_with_numbers):
            found.append(name)
    return found


def _has_number_labels(cohort: Cohort, target: str) -> bool:
    """Return whether the labels of a target are 0 and 1, or one of them."""
    return bool(values := _group_by_value(cohort, target)) and values.keys() <= _NUMBERS


def needs_number_labels(cohort: Cohort, target: str, kind: TargetKind) -> bool:
    """Return whether the labels of another table are 0 and 1, and none of them is a text of the classes in training."""
    return _has_number_labels(cohort, target) and not _class_texts_of(kind) & _group_by_value(cohort, target).keys()


def _class_texts_of(kind: TargetKind) -> frozenset[str]:
    """Return the normalised texts of the classes; empty for the labels 0 and 1."""
    return frozenset(normalise_label(text) for texts in kind.label_texts.values() for text in texts)


def clean_label(cohort: Cohort, text: str, kind: TargetKind) -> str:
    """Return the text of a label; empty if it is missing. A text that is named as a class is never missing."""
    return "" if _is_missing(cohort, text, _class_texts_of(kind)) else text


def _is_missing(cohort: Cohort, text: str, named: Collection[str]) -> bool:
    return cohort.is_missing(text) and normalise_label(text) not in named


def _describe_label_columns(cohort: Cohort, names: Iterable[str] | None = None) -> list[str]:
    """Return one line per label column: its values, or how many different ones it has."""
    return [f"{name}: {_describe_values(cohort, name)}" for name in names or cohort.label_names]


def describe_target(cohort: Cohort, target: str, kind: TargetKind) -> str:
    """Return one sentence about a target: its classes, their numbers of slides, and the missing values."""
    labels = [kind.parse_label(clean_label(cohort, row.labels[target], kind)) for row in cohort.rows]
    counts = f"{kind.describe_counts(labels, 'slide')}"
    if texts := kind.label_texts:
        positive, negative = (", ".join(texts[name]) for name in ("positive", "negative"))
        counts = f"{labels.count(1):,} slides are {positive} (positive), {labels.count(0):,} are {negative} (negative)"
    missing = _describe_missing(cohort, target, _class_texts_of(kind))
    return f"Target {target}: {counts}{f'; {missing}' if missing else ''}."


def _choose_targets(
    cohort: Cohort, request: TargetRequest, other_hint: str
) -> tuple[tuple[str, ...], list[TableProblem]]:
    """Return the requested targets, or else the only candidate; problems if there is none or more than one."""
    if repeated := [name for name in dict.fromkeys(request.targets) if request.targets.count(name) > 1]:
        return request.targets, [TableProblem(f"the target '{repeated[0]}' is named twice")]
    if request.targets:
        return request.targets, []
    candidates = _find_target_candidates(cohort)
    if len(candidates) == 1 and _group_by_value(cohort, candidates[0]).keys() >= _NUMBERS:
        return tuple(candidates), []
    if not cohort.rows:
        return (), []  # that is a problem of the table
    columns = _describe_label_columns(cohort, candidates or cohort.label_names) or ["the table has no label column"]
    what = "no column can be the target, because none has two classes"
    if candidates:
        what = f"{len(candidates)} columns can be the target"
    if len(candidates) == 1:
        what = "1 column can be the target, but its labels are not 0 and 1"
    hints = (
        [f"Name the target, for example {format_command_option('--target', candidates[0])}"]
        if len(candidates) > 1
        else []
    )
    if classes := _example_of_classes(cohort, candidates or cohort.label_names):
        condition = "If its labels are not 0 and 1, name" if hints else "Name"
        hints.append(f"{condition} the positive class, for example {classes}")
    elif not candidates:
        hints.append("Add a column with the labels 0 and 1. Leave the cell empty if a label is unknown.")
    return (), [TableProblem(f"{what}:\n    " + "\n    ".join(columns), hint="\n".join([*hints, other_hint]).strip())]


def _example_of_classes(cohort: Cohort, names: Sequence[str]) -> str:
    """Return options that name the classes of a column with text labels, as an example; empty if there is none."""
    for name in sorted(names, key=lambda name: len(_group_by_value(cohort, name))):
        values = sorted(_group_by_value(cohort, name).values(), key=len, reverse=True)
        texts = [_text(name, rows) for rows in values[:2]]
        has_few_values = 2 <= len(values) <= max(2, sum(map(len, values)) / 2)  # not a measurement or a remark
        if has_few_values and not _has_number_labels(cohort, name) and all(text == _shorten(text) for text in texts):
            first, second = (format_command_option("--positive", f"{name}={text}") for text in texts)
            if len(values) == 2:
                return f"{first} or {second}"
            return f"{first} {format_command_option('--negative', f'{name}={texts[1]}')}"
    return ""


def _unknown_target(cohort: Cohort, target: str) -> TableProblem:
    if normalise_column_name(target) == normalise_column_name(cohort.patient_column):
        text = f"'{target}' cannot be a target, because it is the column of patients"
        return TableProblem(text, hint="Name the column of patients with --patient-column, or rename this column.")
    if target in cohort.columns:
        text = f"'{target}' cannot be a target, because it is a column of slides, patients, scales or splits"
        return TableProblem(text, hint="Rename the column in the table.")
    problem = unknown_column_problem("--target", target, cohort.label_names)
    return TableProblem(f"no label column '{target}'", hint=problem.hint)


def _find_kind(
    cohort: Cohort, target: str, texts: Mapping[str, Sequence[str]]
) -> tuple[BinaryTarget, list[TableProblem]]:
    """Return the kind of one target, and a problem for each value that is not one of its labels."""
    named = frozenset(normalise_label(text) for each in texts.values() for text in each)
    values = _group_by_value(cohort, target, named)
    if not texts:
        kind = BinaryTarget()
        unusable = {value: rows for value, rows in values.items() if value not in _NUMBERS}
        return kind, _unusable_labels(cohort, target, unusable, ["0", "1"])
    positive = list(dict.fromkeys(texts["positive"]))
    negative = list(dict.fromkeys(texts.get("negative", ())))
    others = {value: rows for value, rows in values.items() if value not in map(normalise_label, positive)}
    problems = []
    if both := sorted({*map(normalise_label, positive)} & {*map(normalise_label, negative)}):
        problems.append(TableProblem(f"{target}: '{both[0]}' is both positive and negative"))
    if not negative:
        if len(others) != 1:
            listed = _describe_values(cohort, target)
            need = "several other values" if others else "no other value"
            hint = "A target needs slides of both classes."
            if others:
                _, most = max((len(rows), _text(target, rows)) for rows in others.values())
                hint = (
                    f"Name the negative class: {format_command_option('--negative', f'{target}={most}')}. Each other "
                    f"value: --negative {target}=VALUE too, or --missing VALUE if it means that the label is unknown."
                )
            return BinaryTarget((), tuple(positive)), [
                TableProblem(f"{target} has {need} beside {', '.join(positive)}: {listed}", hint=hint)
            ]
        negative = [_text(target, next(iter(others.values())))]
    unusable = {value: rows for value, rows in others.items() if value not in map(normalise_label, negative)}
    problems += _unusable_labels(cohort, target, unusable, [*positive, *negative])
    if not any(normalise_label(text) in values for text in positive):
        problems.append(
            TableProblem(
                f"{target} has no value {', '.join(positive)}; it contains {_describe_values(cohort, target)}",
                hint="Name a value of the column: --positive NAME=VALUE",
            )
        )
    return BinaryTarget(tuple(negative), tuple(positive)), problems


def _unusable_labels(
    cohort: Cohort, target: str, unusable: Mapping[str, Sequence[SlideRow]], valid: Sequence[str]
) -> list[TableProblem]:
    """Return a problem for each value of a target that is not a label."""
    if not unusable:
        return []
    classes = _example_of_classes(cohort, [target])
    if classes and len(unusable) == len(_group_by_value(cohort, target)):
        hint = f"{target}: name the positive class, for example {classes}"
    else:
        text = _text(target, next(iter(unusable.values())))
        hint = f"{target}: write {', '.join(valid)}, or leave the cell empty if the label is unknown. "
        hint += f"If '{_shorten(text)}' means unknown: {format_command_option('--missing', text)}"
        if {*valid} != _NUMBERS:
            hint += f"; if it is negative: {format_command_option('--negative', f'{target}={text}')}"
    return [
        TableProblem(
            f"{target} is '{_shorten(_text(target, rows))}', which is not {', '.join(valid)} or a missing value",
            tuple(row.row for row in rows),
            hint,
        )
        for rows in unusable.values()
    ]


def _group_by_value(cohort: Cohort, name: str, named: Collection[str] = ()) -> dict[str, list[SlideRow]]:
    """Return the rows by value of a column, without missing values. named: values that are never missing."""
    found: dict[str, list[SlideRow]] = defaultdict(list)
    for row in cohort.rows:
        if not _is_missing(cohort, row.labels[name], named):
            found[normalise_label(row.labels[name])].append(row)
    return dict(sorted(found.items()))


def _text(name: str, rows: Sequence[SlideRow]) -> str:
    """Return how the table writes the value of these rows."""
    return rows[0].labels[name]


def _shorten(text: str) -> str:
    """Return a text in one line, shortened for a message."""
    text = " ".join(text.split())
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def _describe_values(cohort: Cohort, name: str) -> str:
    values = _group_by_value(cohort, name)
    missing = _describe_missing(cohort, name)
    texts = [_shorten(_text(name, rows)) for rows in values.values()]
    if len(values) > _MAX_VALUES:
        described = f"{len(values):,} different values, such as {', '.join(texts[:3])}"
    else:
        described = ", ".join(f"{text} ({len(rows):,})" for text, rows in zip(texts, values.values(), strict=True))
    return "; ".join(filter(None, (described, missing)))


def _describe_missing(cohort: Cohort, name: str, named: Collection[str] = ()) -> str:
    """Return how many values of a column are missing, and how the table writes them; empty if none is."""
    counts: dict[str, int] = defaultdict(int)
    for row in cohort.rows:
        if _is_missing(cohort, text := row.labels[name], named):
            counts[text or "empty"] += 1
    if not counts:
        return ""
    return f"{sum(counts.values()):,} missing ({', '.join(f'{text}: {count:,}' for text, count in counts.items())})"
