"""tools/test_wheel.py: which Pythons and torches meet, and what makes two wheels the same."""

import zipfile

from tools.test_wheel import combinations, differences


def test_each_python_and_each_torch_occurs_and_the_newest_meet():
    pythons, torches = ["3.10", "3.11", "3.12"], ["2.11", "2.15"]
    for first, second in ((pythons, torches), (torches, pythons), (pythons, pythons)):
        pairs = combinations(first, second)
        assert len(pairs) == max(len(first), len(second)) and pairs[-1] == (first[-1], second[-1])
        assert {a for a, _ in pairs} == set(first) and {b for _, b in pairs} == set(second)


def test_wheels_are_the_same_but_for_dates_and_the_platforms_name(tmp_path):
    def wheel(name, year, **changes):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            files = {"a/__init__.py": "1", "a/_C_cpu.so": "2", "a.dist-info/METADATA": "3", **changes}
            for file, text in {**files, "a.dist-info/WHEEL": name, "a.dist-info/RECORD": name}.items():
                archive.writestr(zipfile.ZipInfo(file, (year, 1, 1, 0, 0, 0)), text)
        return tmp_path / name

    one = wheel("one.whl", 2001)
    assert differences(one, wheel("other.whl", 2002)) == []
    assert differences(one, wheel("changed.whl", 2001, **{"a/_C_cpu.so": "4"})) == ["a/_C_cpu.so"]
    assert differences(wheel("more.whl", 2001, **{"a/b.py": ""}), one) == ["a/b.py"]
