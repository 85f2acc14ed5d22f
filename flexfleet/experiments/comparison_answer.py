"""Answer the question of a comparison in one sentence and four tiles (`flexfleet.reports.answer`).

The rows of interest are the first variant and the best of the other variants with the same data and network. With three
or more seeds, the sentence states the result of the paired test between the two rows.
"""

from __future__ import annotations

from flexfleet.experiments.comparison_file import ComparisonFile, Spread, Summary, by_case
from flexfleet.experiments.comparison_tables import failed, fine, seconds
from flexfleet.files.measure import Measure
from flexfleet.reports.answer import Answer, Metric, Standing, compared, count, interest, named, tiles


def answer(c: ComparisonFile) -> Answer:
    """Return the sentence and the tiles with which the terminal, the page and the Markdown file begin."""
    metric, two = metric_of(c), [_standing(c, label) for label in rows_of_interest(c)]
    main, other = two[0], two[1] if len(two) > 1 else None
    seeds, of = count(len(c.seeds), "seed"), "clients_mean" if metric.on_clients else "avg"
    if cases := [case for case in by_case(c.results) if len(case.labels) > 1]:
        ranked = {case.labels: case.first.get(of) for case in c.cases}
        best = [max(case.labels, key=lambda label: _value(c.results[label], metric)) for case in cases]
        won = [(first := ranked.get(case.labels)) is not None and first.first for case in cases]
        shown = ", ".join(f"{label} ({case})" for label, case in list(zip(best, cases, strict=True))[:3])
        more = ", and others" if len(cases) > 3 else ""
        how = f"significantly in {sum(won)} of {len(cases)} cases, {seeds}" if c.cases else f"{seeds}, not tested"
        sentence = f"Highest {metric.measure.name} in each case: {shown}{more}; {how}"
    elif other is not None:
        first = (c.first or {}).get(of)
        pair = {main.label, other.label}
        behind = first.behind[(pair - {first.highest}).pop()] if first and first.highest in pair else None
        p, apart = (behind.p_holm, behind.apart) if behind else (None, False)
        sentence = compared(main, other, metric, len(c.seeds), p, apart)
    else:
        after = f"after {count(main.rounds, 'round')} with {main.mb:,.1f} MB"
        sentence = f"{main.name} reaches {metric.score(main.value)} {after}; {seeds}"
    timed = c.results[main.label].seconds_simulated is not None
    return Answer(c.id, sentence, tiles(metric, main, other, "time, simulated" if timed else "time"))


def metric_of(c: ComparisonFile) -> Metric:
    results = c.results.values()
    on_clients = all(r.clients_mean is not None for r in results)
    return Metric(Measure(c.metric), on_clients, any(r.kept_by_clients for r in results))


def rows_of_interest(c: ComparisonFile) -> tuple[str, ...]:
    """Return the labels of the first variant and of the best other variant with the same data and network."""
    metric, first = metric_of(c), c.labels[0]
    labels = next((case.labels for case in by_case(c.results) if first in case.labels), c.labels)
    return interest({label: _value(c.results[label], metric) for label in labels})


def _value(r: Summary, metric: Metric) -> float:
    return r.clients_mean.mean if metric.on_clients and r.clients_mean is not None else r.last.avg.mean


def _standing(c: ComparisonFile, label: str) -> Standing:
    r, metric = c.results[label], metric_of(c)
    sent, time = r.mb_down.mean + r.mb_up.mean, r.seconds if r.seconds_simulated is None else r.seconds_simulated
    value, (shown_sent, shown_time) = _value(r, metric), (Spread(mean=mean, std=None) for mean in (sent, time.mean))
    shown = (metric.measure.with_unit(value), f"{fine(shown_sent)} MB", f"{seconds(shown_time)} s", failed(r))
    name = named(label, r.algorithm, r.settings.get("eligible"))
    return Standing(label, name, value, r.last.round.mean, sent, shown)
