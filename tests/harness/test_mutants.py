"""The runner of mutants: which changes it makes, and that it reports those that no test notices, and only those."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

from tests.harness.mutants import ROOT, TESTS, changed, mutants

SOURCE = '''
"""Not looked into."""
LIMIT: "int" = 3
def act(store, a, b, *, deep=False):
    check(store)
    if a < b and not deep:
        raise ValueError(f"at most {LIMIT}")
    log.info("%s", a - b)
    store.x = max(n for n in b if n)
    return key(f"{a} of {b}", deep=True)
'''


def test_what_is_changed() -> None:
    said = [f"{m.line} {m.said}" for m in mutants(ast.parse(SOURCE))]
    assert said == [
        "3 3 -> 4",
        "4 False -> True",
        "5 left out: check(store)",
        "6 negated: a < b and (not deep)",
        "6 a < b and (not deep) without a < b",
        "6 a < b and (not deep) without not deep",
        "6 a < b -> a <= b",
        "6 negated: not deep",
        '7 left out: raise ValueError(f"at most {LIMIT}")'.replace('"', "'"),
        "9 left out: store.x = max((n for n in b if n))",
        "9 max((n for n in b if n)) -> min",
        "9 always: n",
        "10 key(f'{a} of {b}', deep=True) without deep",
        "10 f'{a} of {b}' without a",
        "10 f'{a} of {b}' without b",
        "10 True -> False",
    ]


def test_a_mutant_has_one_change_and_can_be_compiled() -> None:
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    for number, mutant in enumerate(mutants(ast.parse(SOURCE))):
        tree = changed(SOURCE, number)
        compile(tree, "<mutant>", "exec")
        found = ast.unparse(tree).splitlines()
        assert [line for line in plain if line not in found][:1] != [] or len(found) != len(plain), mutant.said


def test_what_once_went_unnoticed_is_among_the_changes() -> None:
    said = {
        module: [m.said for m in mutants(ast.parse((ROOT / f"fl_engine/{module}.py").read_text()))] for module in TESTS
    }
    assert said["storage/checkpoints"].count("left out: self.check_lease()") >= 2
    assert any(text.endswith("-> min") and "_plain" in text for text in said["storage/checkpoints"])
    assert any("order_sum(order)" in text and "without" in text for text in said["exchange/manifest"])


def test_the_runner_tells_what_survives_from_what_does_not(tmp_path: Path) -> None:
    """The engine has one line; its test checks one half of that line."""
    for name in ("fl_engine/storage", "tests/laws", "tests/harness"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "fl_engine/__init__.py").touch()
    (tmp_path / "fl_engine/storage/lease.py").write_text("def late(a, b):\n    return a > b or a < 0\n")
    test = "from fl_engine.storage.lease import late\n\ndef test_late():\n    assert late(2, 1) and not late(1, 1)\n"
    (tmp_path / "tests/laws/test_lease.py").write_text(test)
    (tmp_path / "tests/harness/mutants.py").write_text((ROOT / "tests/harness/mutants.py").read_text())
    only = "mutants.main(['--only', 'storage/lease', '--json'])"
    command = [sys.executable, "-c", f"from tests.harness import mutants; mutants.PRELOADED = (); {only}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "tried": 5,
        "killed": 2,
        "survivors": [
            "fl_engine/storage/lease.py:2: a > b or a < 0 without a < 0",
            "fl_engine/storage/lease.py:2: a < 0 -> a <= 0",
            "fl_engine/storage/lease.py:2: 0 -> 1",
        ],
    }
    (tmp_path / "tests/laws/test_lease.py").write_text("def test_nothing():\n    assert False\n")
    failed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert failed.returncode == 1 and "fail without any change" in failed.stderr
