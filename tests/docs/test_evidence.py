"""Each number in the tables of docs/evidence.md is in the results of the comparison that its table names.

Before each table stands a comment that says where its cells come from:

    <!-- results: cifar10-dirichlet
    rows: flexfl,heterofl,cifar10-iid:flexfl
    columns: levels|last.avg,last.full|mb|paper
    -->

`rows`: the comparison's label of each row; `ID:LABEL` is of another comparison. A comparison with * stands for all that
match; the figures are the mean and deviation over them. `columns`: the figures of each cell but the first, which names
the row; a cell of several figures has them parted by commas. `FIGURE in ID` is of another comparison, `FIGURE of NAME`
of another label, in which * stands for the row's own. `paper` is a column that quotes a paper, and says so in its head.
An empty cell says nothing, a dash that there is no such figure. The table of claims has `<!-- claims -->`; its last two
columns are the scale, which ends with the seeds, and the comparisons of a claim.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import ttest_rel

from benchmarks import attacks
from flexfleet.files.measure import Measure
from flexfleet.reports.page import NONE

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "evidence.md").read_text()
RESULTS: dict[str, Any] = json.loads((DOCS / "evidence" / "results.json").read_text())
NUMBER = re.compile(r"-?[\d,]*\.?\d+")
Value = tuple[float, float | None]
"""A mean, and its deviation if there is one."""


def tables(page: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Each table's comment, empty without one, and the cells of its head and rows."""
    for found in re.finditer(r"(?:<!-- ((?:(?!-->)[\s\S])*?)\s*-->\n)?((?:^\|.*\|\n)+)", page, re.MULTILINE):
        lines = [
            [cell.strip(" *") for cell in line.strip("|").split("|")] for line in found[2].strip().split("\n")
        ]  # no cell has a bar of its own
        yield found[1] or "", [line for line in lines if not all(set(cell) <= set("-: ") for cell in line)]


def pooled(id: str, label: str, figure: str) -> list[Value] | None:
    """The values of a comparison, or their mean and deviation over the comparisons that match `id`."""
    found = [values(RESULTS[each]["comparison"], label, figure) for each in fnmatch.filter(RESULTS, id)]
    if len(found) == 1:
        return found[0]
    return [(mean(of), stdev(of)) for of in zip(*([value for value, _ in each or ()] for each in found), strict=True)]


def values(comparison: dict[str, Any], label: str, figure: str) -> list[Value] | None:
    """What a cell has to print; None if the results have no such figure."""
    of = comparison["results"].get(label)
    if of is None:
        return None
    scale = Measure(comparison.get("metric", "accuracy")).scale

    def spread(found: dict[str, float | None] | None, scale: float = 1) -> list[Value] | None:
        if found is None or found["mean"] is None:
            return None
        return [(scale * found["mean"], None if found["std"] is None else scale * found["std"])]

    match figure.split("."):
        case ["levels"]:
            return [(size, None) for size in of["levels"]]
        case ["mb"]:
            return [(of["mb_down"]["mean"] + of["mb_up"]["mean"], None)]
        case ["own"]:  # where all devices hold one sub-network, its value
            return spread(of["devices"] or of["last"]["full"], 100)
        case ["highest", which, percent]:
            (one,) = [one for one in of["highest"] if one["share"] == int(percent)]
            return spread(one[which], scale)
        case ["last", which]:
            return spread(of["last"][which], scale)
        case ["to", percent, spent]:
            (one,) = [one for one in of["reached"] if math.isclose(one["accuracy"], float(percent) / 100)]
            return spread(one[spent])
        case ["reach", percent]:
            (one,) = [one for one in of["reached"] if math.isclose(one["accuracy"], float(percent) / 100)]
            mb, seconds = spread(one["mb"]), spread(one["seconds_simulated"])
            return None if mb is None or seconds is None else [*mb, *seconds]
        case [name]:
            return spread(of[name], 100 if name == "waste" or name.startswith(("local_", "clients_")) else 1)
    raise AssertionError(f"no figure is called {figure}")


def printed(text: str, value: float) -> bool:
    """Whether this is the value, to the digits that are shown."""
    digits = len(text.partition(".")[2])
    return abs(float(text.replace(",", "")) - value) <= 0.5 * 10**-digits + 1e-9


def cell_of(cell: str, expected: list[list[Value] | None]) -> bool:
    """Whether the cell prints these figures, in this order, and nothing else."""
    known = [value for each in expected if each is not None for value in each]
    if cell in ("", NONE):
        return not cell or not known
    left = NUMBER.findall(cell)
    for value, deviation in known:
        if not left or not printed(left.pop(0), value):
            return False
        if "±" in cell and (deviation is None or not left or not printed(left.pop(0), deviation)):
            return False
    return not left


def looked_up(written: str, id: str, row: str) -> list[list[Value] | None]:
    """The figures of a cell."""
    found = []
    for each in written.split(","):
        figure, _, where = each.strip().partition(" in ")
        figure, _, name = figure.partition(" of ")
        where = where or id
        known = RESULTS[fnmatch.filter(RESULTS, where)[0]]["comparison"]["results"]
        label = name.replace("*", row) if name.replace("*", row) in known else row
        found.append(pooled(where, label, figure))
    return found


def seeds(comparisons: str) -> str:
    """Return how the table of claims names the seeds of the comparisons in a cell; empty without comparisons."""
    ids = [id for id in RESULTS for name in re.findall("`([^`]+)`", comparisons) if fnmatch.fnmatch(id, name)]
    runs = [run for id in ids for each in RESULTS[id]["comparison"]["results"].values() for run in each["runs"]]
    found = sorted({run["seed"] for run in runs})
    return f"{len(found)} seeds" if len(found) > 1 else f"seed {found[0]}" if found else ""


def wrong(page: str) -> list[str]:
    """A line for each cell that is not in its results, and for each table that does not say where it comes from."""
    lines = []
    for about, cells in tables(page):
        head, *body = cells
        title = " | ".join(head)
        if about == "claims":
            lines += [f"{row[0]}: {row[-1]} has other seeds" for row in body if not row[-2].endswith(seeds(row[-1]))]
            continue
        given = dict(re.findall(r"^(results|rows|columns): (.*)$", about, re.MULTILINE))
        if given.keys() != {"results", "rows", "columns"} or not fnmatch.filter(RESULTS, given["results"]):
            lines.append(f"{title}: no comment says which comparison the table is from")
            continue
        labels, columns = given["rows"].split(","), given["columns"].split("|")
        if len(labels) != len(body) or any(len(row) != len(columns) + 1 for row in cells):
            lines.append(f"{title}: {len(labels)} rows and {len(columns)} columns are named, the table has others")
            continue
        for name, (said, *row) in zip(labels, body, strict=True):
            for column, cell, over in zip(columns, row, head[1:], strict=True):
                if column == "paper":
                    lines += [] if "paper" in over else [f"{title}: {over} does not say that it quotes a paper"]
                else:
                    id, _, label = name.rpartition(":")
                    if not cell_of(cell, looked_up(column, id or given["results"], label)):
                        lines.append(f"{title}: {said}, {over}: {cell} is not {column} of {name}")
    return lines


def test_numbers_in_evidence_tables_equal_results() -> None:
    assert len(list(tables(PAGE))) > 10
    assert wrong(PAGE) == []


FINDINGS = """
cifar10-vgg16_all flexfl-heterofl,flexfl-scalefl full,avg
cifar10-vgg16_dirichlet flexfl-heterofl full,avg
cifar10-vgg16_full_width flexfl-no_apoz full,avg
cifar10-vgg16_iid flexfl-no_apoz avg,full
cifar10-vgg16_iid flexfl-no_kd full
fashion_mnist-ablations flexfl-no_adaptive full,avg
cifar10-dirichlet adaptivefl-heterofl,adaptivefl-all_large avg,full
cifar10-additions heterofl_published-heterofl,scalefl_kd-scalefl avg,full
cifar10-server_classes fedx_9-adagq_9 devices
five_styles-natural fedbn-fedavg clients_mean
"""
"""Comparisons, and the differences in them that are findings in the table of claims."""


def test_findings_equal_paired_differences() -> None:
    for id, pairs, figures in (line.split() for line in FINDINGS.strip().split("\n")):
        results = RESULTS[id]["comparison"]["results"]
        for labels in (pair.split("-") for pair in pairs.split(",")):
            for figure in figures.split(","):
                ours, theirs = ([run[figure] for run in results[label]["runs"]] for label in labels)
                text = f"{100 * (mean(ours) - mean(theirs)):+.1f}"
                if len(ours) > 1:
                    p = ttest_rel(ours, theirs).pvalue
                    text += f" (p {p:.{3 if p < 0.005 else 2}f})"
                text = f"{figure} {text}" if figure in ("avg", "full") else text
                assert any(text in line and f"`{id}`" in line for line in PAGE.splitlines()), (id, labels, text)


def test_each_comparison_has_the_command_that_makes_it() -> None:
    for id, found in RESULTS.items():
        words = shlex.split(found["command"])
        assert words[:2] == ["flexfleet", "compare"] and words[words.index("--id") + 1] == id, id
        assert found["comparison"]["id"] == id


def test_uniformity_has_its_command_and_its_figures() -> None:
    found = json.loads((DOCS / "evidence" / "uniformity.json").read_text())
    assert found["command"] == "python -m benchmarks.uniformity --json"
    uniformity = [each["uniformity"] for each in found["found"]["correlation"].values()]
    ratios = [each["mb_oort"] / each["oort"] for each in uniformity]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times the uniformity" in " ".join(PAGE.split())


def test_the_detector_has_its_command_and_its_figures() -> None:
    found = json.loads((DOCS / "evidence" / "detection.json").read_text())
    text = PAGE.partition("## Objects in images")[2].partition("\n\n")[2].partition("\n\n")[0]
    told = {float(number.replace(",", "")) for number in NUMBER.findall(text)}
    assert f"`{found['command']}`" in text and {float(value) for value in found["found"].values()} <= told


BOUND_PAGE = (DOCS / "guides" / "bad-clients.md").read_text()
BOUND: dict[str, Any] = json.loads((DOCS / "robustness" / "bound.json").read_text())
HONEST = {
    "digits, FlexFL; HeteroFL": ("digits flexfl", "digits heterofl"),
    "digits, FlexFL, one client per round; two clients": ("digits flexfl 1 client a round", "digits flexfl 2"),
    "digits, most clients with few samples, FlexFL; HeteroFL": (
        "digits, most with few samples flexfl", "digits, most with few samples heterofl"
    ),
    "Fashion-MNIST, FlexFL; HeteroFL": ("fashion_mnist flexfl", "fashion_mnist heterofl"),
    "digits, multibranch": ("digits multibranch",),
    "CIFAR-10 with running statistics, FlexFL; HeteroFL": ("cifar10 flexfl", "cifar10 heterofl"),
}  # fmt: skip
ATTACKED = {
    "change times 90": "change x 90",
    "just below the bound in every round": "just below the bound",
    "just below the bound, reversed": "just below, turned around",
    "longest change that is accepted in every round": "all that is taken",
    "longest accepted change, reversed": "all that is taken, turned around",
    "honest change, reversed": "its own change, turned around",
}


def test_honest_runs_with_a_bound_equal_measurements() -> None:
    assert sum(len(names) for names in HONEST.values()) == len(BOUND["honest"])
    for row, names in HONEST.items():
        found = [BOUND["honest"][name] for name in names]
        off, on = ("; ".join(f"{run[which]['avg']:.1f}" for run in found) for which in ("without", "with"))
        refused = "; ".join(f"{run['with']['refused']} of {run['with']['updates']}" for run in found)
        assert f"| {row} | {off} | {on} | {refused} |" in BOUND_PAGE


def test_attacks_stopped_by_a_bound_equal_measurements() -> None:
    for row, attack in ATTACKED.items():
        flexfl, heterofl = (BOUND["attacked"][f"digits {name}, {attack}"] for name in ("flexfl", "heterofl"))
        caught = [f"{run['caught']} of {run['attacks']}" for run in (flexfl, heterofl) if run["caught"]]
        said = f"| {row} | {flexfl['avg']:.1f} | {heterofl['avg']:.1f} | {'; '.join(caught) or 'none'} |"
        assert said in BOUND_PAGE


def test_tables_of_attacks_equal_measurements() -> None:
    found: dict[str, Any] = json.loads((DOCS / "robustness" / "attacks.json").read_text())
    guide, further = (DOCS / "guides" / "byzantine.md").read_text(), found["further"]["attacks"]
    assert attacks.table(found["attacks"], attacks.DEFAULT_RULES) in (DOCS / "reliability.md").read_text()
    assert attacks.worst_table(found["attacks"], attacks.DEFAULT_RULES) in guide
    assert attacks.table(further, ("judged_trimmed", "geometric_median", "fltrust")) in guide
    text = " ".join(guide.split())
    for honest in (found["attacks"]["none:0"], found["fashion_mnist"]["attacks"]["none:0"]):
        costs = [f"{round(cells['judged']['avg'] - cells['mean']['avg'], 1) + 0.0:.1f}" for cells in honest.values()]
        assert f"by {costs[0]}, {costs[1]} and {costs[2]}" in text
    for rule in ("mean", "judged"):
        others = [found[name]["attacks"]["uphill:3"]["flexfl"][rule]["avg"] for name in ("fashion_mnist", "cifar10")]
        assert all(f"{avg:.1f}" in text for avg in others)
