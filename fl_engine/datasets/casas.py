"""CASAS: motion, door and temperature sensors of three homes; an activity is recognised from at most 2,000 events.

Schmitter-Edgecombe and Cook, Assessing the Quality of Activities in a Smart Environment, Methods of Information in
Medicine 48, 2009; the homes Cairo, Milan, and Kyoto at three times, from https://casas.wsu.edu/datasets. Prepared as
for FedAIoT (Alam, Federated Learning Benchmarks and Frameworks for Artificial Intelligence of Things, Michigan State
University 2023, section 2.2.3.2) after Liciotti et al., A sequential deep learning application for recognising human
activities in smart homes, Neurocomputing 2019: the events between the begin and the end of an activity are a sample,
and so are those between two activities ("other"); the homes' activities are grouped into eleven classes and "other".

Departs from the paper, which describes the 2,000 events before each activity; here, as in its published code, they are
the last 2,000 of the activity's own events. In that code each home numbers its events separately, so a number has
another meaning in another home, and 0 is both an event and padding. Here a number stands for one value of one sensor in
all homes, and 0 is padding alone. Test samples are drawn at random, as there.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fl_engine.core.samples import Data
from fl_engine.core.text import need_plain
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
"""The length of a sample."""
PADDING = 0
TEST_SHARE = 0.2
PUBLISHED = (12_190, 3_048)
"""Training and test samples."""
MOST_SAMPLES = 50_000
"""The set has 15,238 samples of 16 kB each. In a damaged file every line might begin a sample."""
MOST_UNREADABLE = 0.01
"""The largest share of garbled lines in a file. Faulty sensors cause a few, and a damaged file has more."""

CLASSES = (
    "other", "work", "take medicine", "sleep", "leave home", "eat", "bed to toilet", "bathing", "enter home",
    "personal hygiene", "relax", "cook",
)  # fmt: skip
# Names in the files, in lower case and with underscores: first with the resident (R1, R2), then without the resident.
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
"""Maps the first two letters of a value to a state. The rest of some values is garbled."""

HOTTEST = 200
"""Values above this temperature in degrees are garbled."""
DATE = re.compile(rb"\d{4}-\d\d-\d\d")
RESIDENT = re.compile(r"^r\d_")

log = logging.getLogger(__name__)


class Event(NamedTuple):
    word: str
    """A sensor and its value, `M001=on`."""
    activity: str
    """The activity's name in the file, or an empty string."""


def load(root: Path) -> Data:
    """Load the samples of all homes from `root`/casas: tokens (N, 2000), padded in front.

    A token is the rank, from 1 on, of a pair of sensor and value among all that occur, sorted by name. `natural_client`
    is the home. Raises DataError for a file that is missing, has too many lines that are not events, or has no known
    activity.
    """
    require_by_hand("casas", root, FILES, HOW)
    met: dict[str, int] = {}
    """Each word's number, in order of first occurrence."""
    rows: list[array[int]] = []
    labels: list[int] = []
    homes: list[int] = []
    for home, file in enumerate(FILES):
        path = root / file
        names = set()
        for name, words in samples(events(path, read(path))):
            names.add(name)
            rows.append(array("i", (met.setdefault(word, len(met)) for word in words)))
            labels.append(label_of(name))
            homes.append(home)
            if len(rows) > MOST_SAMPLES:
                raise damaged(path, f"at most {MOST_SAMPLES} activities", "more")
        unknown = sorted(name for name in names if bare(name) not in LABELS)
        if names <= {"", *unknown}:
            raise damaged(path, "activities of these homes", "none")
        if unknown:
            log.warning("%s: %d activities are not in the list and count as other: %s", path, len(unknown), unknown)
    places = {word: place for place, word in enumerate(sorted(met), PADDING + 1)}
    token = np.array([places[word] for word in met], dtype=np.int64)
    x = np.full((len(rows), EVENTS), PADDING, dtype=np.int64)
    for of_one, row in zip(x, rows, strict=True):
        of_one[EVENTS - len(row) :] = token[np.frombuffer(row, dtype=np.intc)]
    y = np.array(labels, dtype=np.int64)
    train, test = random_split(len(rows), TEST_SHARE)
    tensors = (*as_tensors(x[train], y[train]), *as_tensors(x[test], y[test]))
    source = torch.from_numpy(np.array(homes, dtype=np.int64)[train])
    data = Data("casas", Classification(len(CLASSES)), *tensors, natural_client=source)
    warn_of_other_counts(data, *PUBLISHED)
    return data


def samples(stream: Iterable[Event]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the last 2,000 words of each run of consecutive events with the same activity, also of runs
    without an activity."""
    for name, stretch in groupby(stream, key=lambda event: event.activity):
        yield name, list(deque((event.word for event in stretch), maxlen=EVENTS))


def events(path: Path, content: bytes) -> Iterator[Event]:
    """Yield the events of motion, door and temperature sensors, in the file's order.

    A line is a date, a time, a sensor, a value, and maybe an activity with `begin` or `end`. These two lines belong to
    the activity, and the begin of another one ends it too. Raises DataError if more than 1 % of the lines are not
    events.
    """
    words: dict[tuple[bytes, bytes], str | None] = {}
    activity, lines, unreadable = "", 0, []
    for number, line in enumerate(content.splitlines(), 1):
        if not (fields := line.split()):
            continue
        lines += 1
        if len(fields) < 4 or not DATE.fullmatch(fields[0]):
            unreadable.append(number)
            continue
        sensor, value = fields[2:4]
        if sensor[:1] not in (b"M", b"D", b"T"):
            continue
        if (sensor, value) not in words:
            words[sensor, value] = word_of(sensor, value)
        word = words[sensor, value]
        if word is None:
            unreadable.append(number)
            continue
        *name, change = fields[4:] or (b"",)
        if change == b"begin":
            activity = b"_".join(name).decode("ascii", "replace").lower()
        yield Event(word, activity)
        if change == b"end":
            activity = ""
    if len(unreadable) > MOST_UNREADABLE * lines:
        form = "lines as `2009-06-10 03:20:59.08 M006 ON Sleep begin`"
        raise damaged(path, form, f"{len(unreadable)} others of {lines}, first line {unreadable[0]}")
    if unreadable:
        log.warning("%s: skipped %d of %d lines, first line %d", path, len(unreadable), lines, unreadable[0])


def word_of(sensor: bytes, value: bytes) -> str | None:
    """Return the word, such as `M001=on` or `T002=21.5`, in half degrees; None for a garbled value."""
    said: str | None
    if sensor[:1] == b"T":
        try:
            need_plain([value.decode("ascii")])
            degrees = float(value)
        except ValueError:
            return None
        said = f"{round(2 * degrees) / 2:.1f}" if abs(degrees) < HOTTEST else None
    else:
        said = STATES.get(value[:2].upper())
    return f"{sensor.decode('ascii', 'replace')}={said}" if said else None


def bare(name: str) -> str:
    """Return the activity's name as in LABELS: unchanged, or without the resident."""
    return name if name in LABELS else RESIDENT.sub("", name)


def label_of(name: str) -> int:
    """Return the class of an activity by its name in a file."""
    return LABELS.get(bare(name), LABELS[""])
