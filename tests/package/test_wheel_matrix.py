"""tools/test_wheel.py: which Pythons and torches meet."""

from tools.test_wheel import combinations


def test_each_python_and_each_torch_occurs_and_the_newest_meet():
    pythons, torches = ["3.10", "3.11", "3.12"], ["2.11", "2.15"]
    for first, second in ((pythons, torches), (torches, pythons), (pythons, pythons)):
        pairs = combinations(first, second)
        assert len(pairs) == max(len(first), len(second)) and pairs[-1] == (first[-1], second[-1])
        assert {a for a, _ in pairs} == set(first) and {b for _, b in pairs} == set(second)
