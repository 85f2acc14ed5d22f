"""CASAS: recognise activities from up to 2,000 events of motion, door and temperature sensors in three homes.

Schmitter-Edgecombe and Cook, Assessing the Quality of Activities in a Smart Environment, Methods of Information in
Medicine 48, 2009. The homes are Cairo, Milan, and Kyoto in three periods (https://casas.wsu.edu/datasets). The data are
prepared as in FedAIoT (Alam, Federated Learning Benchmarks and Frameworks for Artificial Intelligence of Things,
Michigan State University 2023, section 2.2.3.2). FedAIoT follows Liciotti et al., A sequential deep learning
application for recognising human activities in smart homes, Neurocomputing 2019. A sample consists of the events from
the beginning to the end of an activity, or of the events between two activities (class "other"). The activities of all
homes are grouped into eleven classes and "other".

Departs from the paper, in which a sample has the 2,000 events before an activity. Here, as in the paper's published
code, a sample has the last 2,000 events of the activity itself. The published code numbers each home's events from 0,
so a number has a different meaning in each home, and 0 stands for both an event and the padding. Here a number has the
same meaning in all homes, and 0 is used only for padding. Test samples are drawn at random, as in the published code.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from fl_engine.core.samples import Data
from fl_engine.data.files import damaged, read, require_by_hand, warn_of_other_counts
from fl_engine.data.transforms import as_tensors, random_split
from fl_engine.tasks import Classification

ABOUT = "CASAS, 2,000 tokens, 12 activities, 5 homes; no licence stated; about 230 MB, by hand"
FILES = (
    "casas/cairo/data",
    "casas/twor.2009/data",  # Kyoto 2
    "casas/twor.2010/data",  # Kyoto 4
    "casas/twor.summer.2009/annotated",  # Kyoto 3
    "casas/milan/data",
)
URL = "https://casas.wsu.edu/datasets"
HOW = (
    f"Download the data sets cairo, milan, twor.2009, twor.summer.2009 and twor.2010 of {URL} (about 230 "
    "MB, no licence stated, no form) and unpack each into a folder of its name in casas/"
)
EVENTS = 2000
"""Length of a sample in events."""
PADDING = 0
TEST_SHARE = 0.2
PUBLISHED = (12_190, 3_048)
"""Numbers of training and test samples."""
MOST_SAMPLES = 50_000
"""Maximum number of samples. The data set has 15,238 samples, but a damaged file might yield one sample per line."""
MOST_UNREADABLE = 0.01
"""Maximum fraction of unreadable lines in a file. Faulty sensors cause a few unreadable lines, but a damaged file
contains more."""

CLASSES = (
    "other", "work", "take medicine", "sleep", "leave home", "eat", "bed to toilet", "bathing", "enter home",
    "personal hygiene", "relax", "cook",
)  # fmt: skip
# Names are in lower case with underscores. If a name is unknown, the reader tries it without the prefix `r1_` or `r2_`.
ACTIVITIES = {
    "other": "wake wakeup night_wandering wandering_in_room study wash_bathtub grooming bed_toilet_transition "
    "master_bedroom_activity meditate",
    "work": "work work_in_office laundry clean cleaning housekeeping chores desk_activity",
    "take medicine": "take_medicine morning_meds eve_meds",
    "sleep": "sleep sleeping_not_in_bed",
    "leave home": "leave_home",
    "eat": "breakfast dinner lunch eating dining_rm_activity",
    "bed to toilet": "bed_to_toilet r1_bed_toilet_transition r2_bed_toilet_transition",
    "bathing": "shower bathing master_bathroom guest_bathroom",
    "enter home": "enter_home",
    "personal hygiene": "personal_hygiene",
    "relax": "watch_tv read",
    "cook": "meal_preparation cooking kitchen_activity",
}
LABELS = {name: CLASSES.index(label) for label, names in ACTIVITIES.items() for name in names.split()}
LABELS[""] = CLASSES.index("other")
STATES = {b"ON": "on", b"OF": "off", b"OP": "open", b"CL": "closed"}
"""Maps the first two characters of a value to a state. The other characters may be damaged and are ignored."""

DEGREES = re.compile(rb"-?[01]?\d{1,2}(\.\d*)?")
"""Pattern of a temperature. Values of 200 degrees or more are invalid."""
DATE = re.compile(rb"\d{4}-\d\d-\d\d")
RESIDENT = re.compile(r"^r\d_")

log = logging.getLogger(__name__)


Event = tuple[str, str]
"""Sensor and value, such as `M001=on`, and the name of the activity in the file. The name is empty between
activities."""


def load(root: Path) -> Data:
    """Load the samples of all homes from `root`/casas as tokens (N, 2000), with padding at the start.

    All words such as `M001=on` are sorted by name, and the token of a word is its position in this order, counted from
    1. `natural_client` is the home. Raises DataError if a file is missing, has too many unreadable lines, or does not
    contain a known activity.
    """
    require_by_hand("casas", root, FILES, HOW)
    word_numbers: dict[str, int] = {}
    """Maps words to numbers, in order of first occurrence."""
    rows: list[array[int]] = []
    labels: list[int] = []
    homes: list[int] = []
    for home, path in enumerate(root / file for file in FILES):
        names = set()
        for name, words in samples(events(path, read(path))):
            names.add(name)
            rows.append(array("i", (word_numbers.setdefault(word, len(word_numbers)) for word in words)))
            labels.append(label_of(name))
            homes.append(home)
            if len(rows) > MOST_SAMPLES:
                raise damaged(path, f"at most {MOST_SAMPLES} activities", "more")
        unknown = sorted(name for name in names if bare(name) not in LABELS)
        if names <= {"", *unknown}:
            raise damaged(path, "activities of these homes", "none")
        if unknown:
            log.warning("%s: assigned %d unknown activities to the class 'other': %s", path, len(unknown), unknown)
    token = np.zeros(len(word_numbers), dtype=np.int64)
    token[[word_numbers[word] for word in sorted(word_numbers)]] = np.arange(len(word_numbers)) + PADDING + 1
    x = np.full((len(rows), EVENTS), PADDING, dtype=np.int64)
    for sample, row in zip(x, rows, strict=True):
        sample[EVENTS - len(row) :] = token[np.frombuffer(row, dtype=np.intc)]
    y, source = np.array(labels, dtype=np.int64), np.array(homes, dtype=np.int64)
    train, test = random_split(len(rows), TEST_SHARE)
    tensors = as_tensors(x[train], y[train], x[test], y[test])
    data = Data("casas", Classification(len(CLASSES)), *tensors, natural_client=torch.from_numpy(source[train]))
    return warn_of_other_counts(data, *PUBLISHED)


def samples(stream: Iterable[Event]) -> Iterator[tuple[str, list[str]]]:
    """Yield the activity and the last 2,000 words of each group of consecutive events with the same activity. Events
    without an activity form groups with an empty name."""
    for name, stretch in groupby(stream, key=lambda event: event[1]):
        yield name, list(deque((word for word, _ in stretch), maxlen=EVENTS))


def events(path: Path, content: bytes) -> Iterator[Event]:
    """Yield the events of motion, door and temperature sensors, in the file's order.

    A line has a date, a time, a sensor, a value, and optionally an activity with `begin` or `end`. The lines with
    `begin` and `end` belong to the activity. An activity also ends when another activity begins. Raises DataError if
    more than 1 % of the lines are unreadable.
    """
    activity, lines, unreadable = "", 0, []
    for number, line in enumerate(content.splitlines(), 1):
        if not (fields := line.split()):
            continue
        lines += 1
        whole = len(fields) >= 4 and DATE.fullmatch(fields[0])
        if whole and fields[2][:1] not in (b"M", b"D", b"T"):
            continue
        word = word_of(*fields[2:4]) if whole else None
        if word is None:
            unreadable.append(number)
            continue
        *name, change = fields[4:] or (b"",)
        if change == b"begin":
            activity = b"_".join(name).decode("ascii", "replace").lower()
        yield word, activity
        if change == b"end":
            activity = ""
    if len(unreadable) > MOST_UNREADABLE * lines:
        form = "lines such as `2009-06-10 03:20:59.08 M006 ON Sleep begin`"
        raise damaged(path, form, f"{len(unreadable)} unreadable lines of {lines} (first: {unreadable[0]})")
    if unreadable:
        log.warning("%s: skipped %d unreadable lines of %d (first: %d)", path, len(unreadable), lines, unreadable[0])


@lru_cache(2**16)
def word_of(sensor: bytes, value: bytes) -> str | None:
    """Return a word such as `M001=on` or `T002=21.5` (rounded to half degrees); None if the value is unreadable."""
    state = STATES.get(value[:2].upper())
    if sensor[:1] == b"T":
        state = f"{round(2 * float(value)) / 2:.1f}" if DEGREES.fullmatch(value) else None
    return f"{sensor.decode('ascii', 'replace')}={state}" if state else None


def bare(name: str) -> str:
    """Return the name if LABELS contains it, otherwise the name without a prefix such as `r1_`."""
    return name if name in LABELS else RESIDENT.sub("", name)


def label_of(name: str) -> int:
    """Return the class index for the name of an activity in a file."""
    return LABELS.get(bare(name), LABELS[""])
