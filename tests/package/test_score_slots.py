"""tools.score_slots: that the code it counts is one pass over a register tile, and that what it holds is seen."""

import shutil

import pytest

from tools import score_slots
from tools.main_loops import X86, disassemble

DISASSEMBLY = """
0000000000000000 <other>:
   0:\tvaddps ymm0,ymm0,ymm1

0000000000000010 <probe>:
  10:\tvroundps ymm0,ymm1,0x8
  16:\tvmovups YMMWORD PTR [rdi],ymm0 # comment
  1c:\tret

0000000000000020 <next>:
  20:\tvsubps ymm0,ymm0,ymm1
"""


def test_the_body_of_the_probe():
    assert score_slots.body(DISASSEMBLY, X86) == ["vroundps ymm0,ymm1,0x8", "vmovups YMMWORD PTR [rdi],ymm0"]


@pytest.mark.skipif(not (shutil.which("objdump") and shutil.which("g++")), reason="no objdump or no g++")
@pytest.mark.skipif(not (shutil.which("llvm-mca") or shutil.which("llvm-mca-19")), reason="no llvm-mca")
def test_what_is_counted(tmp_path):
    machine, _, vectors = score_slots.BUILDS["avx2"]
    code = score_slots.body(disassemble(score_slots.compiled("avx2", tmp_path), machine), machine)
    assert sum(x.startswith("vroundps") for x in code) == vectors  # one of each vector: nothing is left out or repeated
    assert not [x for x in code if x.startswith(("j", "call"))]
    cycles, adds = score_slots.slots(code, "avx2", "skylake")
    # at least the exponential's multiply-adds; twice that of ports, of which the model has two
    assert sum(x.startswith("vfmadd") for x in code) / vectors < adds == pytest.approx(2 * cycles, rel=0.05)
    without = [x for x in code if not x.startswith("vroundps")]
    assert score_slots.slots(without, "avx2", "skylake")[1] < adds - 0.5
