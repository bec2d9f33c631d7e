"""csrc/cuda/recent_cache.h, which holds the tensor maps of the Hopper kernels, by a program of its own."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
CXX = os.environ.get("CXX") or "g++"
PROGRAM = r"""
#include <cstdio>
#include <stdexcept>
#include "cuda/recent_cache.h"
struct Key {
  int place, other;
  bool operator==(const Key&) const = default;
};
int main() {
  attnjourney::Recent<Key, int, 4> recent;
  int made = 0;
  const auto get = [&](int place, int other) {
    const int value = recent.get({place, other}, place, [&] { return made++, 10 * place + other; });
    std::printf("%d:%d ", value, made);
  };
  get(1, 2), get(1, 2), get(2, 2), get(1, 2);  // each made once
  get(1, 3), get(1, 3), get(1, 2);             // the newest of those that differ beyond their hash
  get(5, 2), get(1, 2), get(2, 2);             // 5 falls on the place of 1
  try {
    recent.get({2, 9}, 2, []() -> int { throw std::runtime_error(""); });
  } catch (const std::runtime_error&) {
  }
  get(2, 2), get(2, 9);
}
"""


@pytest.mark.skipif(not CSRC.exists() or shutil.which(CXX) is None, reason="no sources or no compiler")
def test_each_is_made_once_and_none_taken_for_another(tmp_path):
    (tmp_path / "recent.cpp").write_text(PROGRAM)
    program = tmp_path / "recent"
    subprocess.run([CXX, "-std=c++20", f"-I{CSRC}", tmp_path / "recent.cpp", "-o", program], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert printed == "12:1 12:1 22:2 12:2 13:3 13:3 12:4 52:5 12:6 22:6 22:6 29:7 "
