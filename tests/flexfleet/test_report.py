"""The report has the numbers of the run folders, and loads nothing from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fl_engine.core.errors import ConfigError, IntegrityError
from flexfleet.reports import report as r
from flexfleet.reports.finished_run import differences, load, load_all
from flexfleet.reports.page import NONE
from tests.harness.run_folders import write_run

pytestmark = pytest.mark.pictures


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / "a", "flexfl"), write_run(tmp_path / "b", "all_large")]


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of both runs and of a third, flexfl again with another seed and alpha."""
    base = tmp_path_factory.mktemp("runs")
    runs = [write_run(base / "a", "flexfl"), write_run(base / "b", "all_large")]
    runs.append(write_run(base / "c", "flexfl", seed=1, partition={"alpha": 0.3}))
    return page_of(runs, base)


class Page(HTMLParser):
    """The attributes of each tag, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, attribute: str) -> list[str]:
        return [attrs[attribute] for _, attrs in self.tags if attribute in attrs]


def page_of(runs: Sequence[Path], tmp_path: Path) -> str:
    out = tmp_path / "page" / "report.html"
    assert r.report(load_all(runs), out) == out
    assert [p.name for p in out.parent.iterdir()] == ["report.html"]
    return out.read_text("utf-8")


# ----------------------------------------------------------------------------------------------------- numbers
def test_table_has_the_numbers_of_the_run_folders(two: list[Path]) -> None:
    sentence, head, flexfl, all_large = r.table(load_all(two)).splitlines()
    assert sentence == f"{r.answer(load_all(two)).sentence}."
    cells = ["|".join(re.split(r"  +", line.strip())) for line in (head, flexfl, all_large)]
    assert cells[0] == "run|algorithm|avg %|full %|best avg/full % (round)|MB|waste %"
    assert cells[1] == "a|flexfl|65.00|75.00|70.00/80.00 (2)|10.50|25.00"
    assert cells[2] == "b|all_large|72.00|72.00|72.00/72.00 (3)|18.00|50.00"
    assert len({len(head), len(flexfl), len(all_large)}) == 1


def test_page_has_the_numbers_of_the_run_folders(html: str) -> None:
    summary = html[html.index('id="summary"') :]
    lines = summary[: summary.index("</table>")].split("<tr")[2:]
    flexfl, all_large, _ = (dict(re.findall(r'data-of="([^"]+)">([^<]*)<', line)) for line in lines)
    assert flexfl == {
        "algorithm": "flexfl", "seed": "0", "avg %": "65.00", "full %": "75.00",
        "best avg/full (round)": "70.00/80.00 (2)", "MB down": "6.00", "MB up": "4.50",
        "waste %": "25.00", "pruned": "2", "failed": "1",
    }  # fmt: skip
    assert "Equal in all rows: rounds 3, seconds 6.0." in summary
    assert (all_large["avg %"], all_large["best avg/full (round)"]) == ("72.00", "72.00/72.00 (3)")
    assert (all_large["MB down"], all_large["MB up"], all_large["waste %"]) == ("12.00", "6.00", "50.00")
    assert all_large["failed"] == "4"


def test_failures_are_counted_by_client_and_code(tmp_path: Path) -> None:
    sizes = {"fleet": {"tiers": [{"name": "weak", "share": 1.0, "memory": 50.0}]}, "partition": {"clients": 23}}
    run = write_run(tmp_path / "a", "flexfl", **sizes)
    assert r.failures(load(run)) is None
    file = run / "history.json"
    history = json.loads(file.read_text())
    norm, late = {"failure": "validate: norm: far", "code": "norm"}, {"failure": "straggle: late", "code": "straggle"}
    history["rounds"][0]["clients"] = [{"client": client, **norm} for client in range(23)]
    history["rounds"][1]["clients"] = [{"client": 21, **norm}, {"client": 22}]
    history["rounds"][2]["clients"] = [{"client": 21, **late}]
    file.write_text(json.dumps(history))
    table = r.failures(load(run))
    assert table is not None
    lines = [tuple(cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row) for row in table.rows]
    assert len(lines) == 21
    assert lines[0] == ("21", "weak", "3 of 3", "norm 2, straggle 1")
    assert lines[-1] == ("3 more clients", NONE, "3 of 4", "norm 3")
    assert "moved too far" in page_of([run], tmp_path)


def test_report_lists_differences_beside_the_algorithm(html: str, two: list[Path]) -> None:
    # Another dataset.root is another place, not other data.
    assert differences([load(run) for run in two]) == []
    assert "<li>seed: 0 (a), 0 (b), 1 (c)</li>" in html and "<li>partition.alpha: 0.6 (a, b); 0.3 (c)</li>" in html


def test_differences_lists_only_parameters_that_change_figures(tmp_path: Path) -> None:
    own = {"codec": {"up": {"name": "qsgd"}}, "rounds": {"mode": "buffered", "norm_bound": 2.0, "commit_every": 5}}
    nowhere = {"schema_version": 2, "run": {"devices": ["cuda"]}, "tracking": {"ui": "http://here"}}
    off = {"rounds": {"norm_bound": None}}
    runs = [write_run(tmp_path / "a", "flexfl", **off), write_run(tmp_path / "b", "all_large", **own, **nowhere)]
    assert differences([load(run) for run in runs]) == [
        "rounds.norm_bound: null (flexfl); 2.0 (all_large)",
        "codec.up.name: null (flexfl); qsgd (all_large)",
        "rounds.mode: null (flexfl); buffered (all_large)",
    ]


# ------------------------------------------------------------------------------------------- a page on its own
def test_page_loads_nothing_and_has_no_script(html: str) -> None:
    page = Page(html)
    for attribute in ("src", "href", "xlink:href", "srcset", "action"):
        assert all(v.startswith(("#", "data:image/png;base64,")) for v in page.all(attribute))
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "iframe", "img", "object")]
    addresses = re.findall(r"\w+://[^\"'\s<)]+", html)
    assert set(addresses) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in page.text


def test_ids_are_unique_and_references_resolve(html: str) -> None:
    page = Page(html)
    ids = page.all("id")
    assert len(ids) == len(set(ids)) > 100
    wanted = {v[1:] for k in ("href", "xlink:href") for v in page.all(k) if v.startswith("#")}
    wanted |= set(re.findall(r"url\(#([^)]+)\)", html))
    assert wanted and wanted <= set(ids)


def test_names_are_escaped(tmp_path: Path) -> None:
    evil = '_<script>alert(1)</script> $\\frac$ id="summary" \'&'
    runs = [
        write_run(tmp_path / "a", "flexfl", run_id=evil, dataset={"name": evil, evil: evil}),
        write_run(tmp_path / "b", "flexfl", run_id="b"),
    ]
    html = page_of(runs, tmp_path)
    page = Page(html)
    assert "<script" not in html and not [tag for tag, _ in page.tags if tag == "script"]
    assert page.all("id").count("summary") == 1
    assert page.text.count(evil) >= 4  # summary, curves, configuration, provenance


# ------------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    "name", ["run.json", "history.json", "evaluation.json", "pool/pool.json", "partition/partition.json"]
)
def test_missing_file_is_named(two: list[Path], tmp_path: Path, name: str) -> None:
    (two[1] / name).unlink()
    with pytest.raises(IntegrityError, match=name):
        r.report(load_all(two), tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_load_refuses_files_of_another_run(two: list[Path]) -> None:
    pool = two[0] / "pool" / "pool.json"
    pool.write_bytes((two[1] / "pool" / "pool.json").read_bytes())
    with pytest.raises(IntegrityError, match=r"pool\.json"):
        load(two[0])
    evaluation = json.loads((two[1] / "evaluation.json").read_text())
    (two[1] / "evaluation.json").write_text(json.dumps(evaluation | {"rounds": 2}))
    with pytest.raises(IntegrityError, match=r"evaluation\.json"):
        load(two[1])


@pytest.mark.parametrize(
    ("runs", "page", "code"),
    [
        (["a", "b"], "out.pdf", "config"),
        (["a", "b/../a"], "out.html", "config.given_twice"),
        (["nowhere"], "out.html", "config"),
    ],
)
def test_report_refuses_wrong_arguments(two: list[Path], tmp_path: Path, runs: list[str], page: str, code: str) -> None:
    with pytest.raises(ConfigError) as error:
        r.report(load_all([tmp_path / run for run in runs]), tmp_path / page)
    assert error.value.code == code
