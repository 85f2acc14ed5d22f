"""What `make test` has of the suites of pods that a round begins (test_suite.py) and of pods that stay
(test_lasting_suite.py). Both are in one file, since to import all that a pod needs takes longest."""

from __future__ import annotations

from fl_engine.testing.backends import BackendSuite
from tests.k8s.test_lasting_suite import TestPodsThatStay as Lasting
from tests.k8s.test_suite import TestPods as Round


class TestPods:
    chosen, make = Round.chosen, Round.make
    test_bits = BackendSuite.test_equal_bits_where_weights_are_encoded
    test_outcomes = BackendSuite.test_one_outcome_for_each_order
    test_failures = BackendSuite.test_failures_are_outcomes_like_any_other


class TestPodsThatStay:
    chosen, make = Lasting.chosen, Lasting.make
    test_memory = BackendSuite.test_a_round_that_is_over_is_let_go_of
    test_bits = BackendSuite.test_equal_bits_where_weights_are_encoded
    test_failures = BackendSuite.test_failures_are_outcomes_like_any_other
