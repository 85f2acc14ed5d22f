"""Describe the result of a nightly regression run: the checked metrics, the verdict and the sentence that states it."""

from __future__ import annotations

from collections.abc import Sequence

from fl_engine.core.records import Strict
from flexfleet.experiments.nightly_suite import METRICS
from flexfleet.files.artifacts import Artifact
from flexfleet.files.measure import Measure
from flexfleet.reports.answer import Answer, Tile, count
from flexfleet.reports.page import NONE, Table, escaped

HIGHER = ("avg", "full")
"""Metrics for which higher values are better. The thresholds of these metrics are absolute, not relative."""
REFERENCE, PASSED = "reference", "passed runs"
COLUMNS = ("case / algorithm", "figure", "before", "of", "tonight", "limit")


class Check(Strict):
    """Comparison of one metric of one variant with earlier values."""

    label: str
    metric: str
    measured: str = "accuracy"
    """Main metric of the task, from which avg, full, rounds and mb are computed."""
    against: str
    """REFERENCE or PASSED."""
    before: float
    now: float
    worse_by: float
    """Amount by which the metric is worse than the earlier value; negative if the metric is better."""
    allowed: float
    """Largest difference that passes."""
    limit: float
    """Worst value that passes."""
    failed: bool

    @property
    def cells(self) -> tuple[str, ...]:
        """Table row that describes this check, with a cell for each of the columns COLUMNS."""
        shown = Measure(self.measured).with_unit if self.metric in HIGHER else "{:.4g}".format
        figure = METRICS[self.metric].replace("accuracy", self.measured)
        return self.label, figure, shown(self.before), self.against, shown(self.now), shown(self.limit)


class Verdict(Artifact):
    """Contents of regression.json."""

    suite: str
    id: str
    passed: bool
    checks: tuple[Check, ...]
    since: str
    """Text that names the last nightly regression run that passed, or the reference, and the commits since then."""
    commits: tuple[str, ...]
    """Lines `hash subject` for these commits, newest first; empty if the code is not in a git checkout."""
    notes: tuple[str, ...]
    report: str
    mlflow_run_id: str | None

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.failed]

    @property
    def answer(self) -> Answer:
        """Sentence and tiles with which the terminal and the page begin."""
        checks, failed = len(self.checks), len(self.failed)
        worse = sum(check.worse_by > 0 for check in self.checks)
        sentence = f"{self.suite} passed: all {checks} comparisons are within their limits, {worse} of them worse"
        if self.failed:
            label, figure, before, of, now, limit = _worst(self.failed).cells
            sentence = (
                f"{self.suite} failed: {failed} of {count(checks, 'comparison')} exceeded the limit, most clearly the "
                f"{figure} of {label}: {now}, {of} {before}, limit {limit}"
            )
        elif not checks:
            sentence = f"{self.suite} passed without any comparison, because no earlier values are comparable"
        kinds = {"": HIGHER, "MB to the target": ("mb",), "time of a round": ("pace",)}
        changes = [_change(name, [c for c in self.checks if c.metric in kind]) for name, kind in kinds.items()]
        return Answer(self.id, sentence, [*changes, Tile("failed comparisons", f"{failed} of {checks}")])

    def text(self, every: bool = False) -> str:
        """Format the verdict with a table of the failed checks, or of all checks if `every` is True."""
        checks = self.checks if every else self.failed
        lines = [table(checks).text(left=len(COLUMNS))] if checks else []
        return "\n".join([f"{self.answer.sentence}.", *lines, *self.notes, f"report: {self.report}"])

    def markdown(self) -> str:
        since = [f"Since the {self.since}:\n", *(f"- {line}" for line in self.commits)] if self.commits else []
        shown = table(self.failed or self.checks).markdown() if self.checks else ""
        return "\n".join([f"## {escaped(self.answer.sentence)}", "", shown, "", *self.notes, "", *since, ""])


def _worst(checks: Sequence[Check]) -> Check:
    """Return the check with the largest loss relative to the allowed loss."""
    return max(checks, key=lambda check: check.worse_by / (check.allowed or 1))


def _change(name: str, checks: Sequence[Check]) -> Tile:
    """Return a tile with the worst change of a metric. With an empty `name`, the tile has the main metric's name."""
    if not checks:
        return Tile(f"{name or 'metric'}, worst change", NONE)
    worst = _worst(checks)
    change = worst.now - worst.before
    shown = f"{100 * change / worst.before:+.1f} %" if worst.before else f"{change:+.3g}"
    if worst.metric in HIGHER:
        shown = Measure(worst.measured).points(change)
    return Tile(f"{name or worst.measured}, worst change", shown, worst.label)


def table(checks: Sequence[Check]) -> Table:
    return Table("", COLUMNS, [check.cells for check in checks]).varying()
