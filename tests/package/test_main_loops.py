"""tools.main_loops: which loops it takes from a disassembly, and that what waits is seen by the model."""

import shutil

import pytest

from tools import main_loops

# a loop of four chains in a loop that stores; then one chain
DISASSEMBLY = """
0000000000000000 <void attnjourney::(anonymous namespace)::Tile<float>::add<(Kind)0, 8>(float*, long)>:
   0:\tvmovups zmm9,ZMMWORD PTR [rdi]
   6:\tvfmadd231ps zmm0,zmm9,ZMMWORD PTR [rsi]
   c:\tvfmadd231ps zmm1,zmm9,zmm10
  12:\tvfmadd231ps zmm2,zmm9,zmm11 # comment
  18:\tvfmadd231ps zmm3,zmm9,zmm12
  1e:\tcmp rcx,rdx
  21:\tjne 6 <void attnjourney::(anonymous namespace)::Tile<float>::add<(Kind)0, 8>(float*, long)+0x6>
  23:\tvmovups ZMMWORD PTR [rdi],zmm0
  29:\tjne 0 <void attnjourney::(anonymous namespace)::Tile<float>::add<(Kind)0, 8>(float*, long)>

0000000000000040 <auto attnjourney::chain(double const*)::{lambda(auto:1)#1}::operator()() const>:
  40:\tvfmadd231pd ymm0,ymm1,ymm2
  46:\tdec rcx
  49:\tjne 40 <chain>
"""
# the same loop of four, with elements of a register
AARCH64 = """
0000000000000000 <void attnjourney::(anonymous namespace)::Tile<float>::add<(Kind)0, 8>(float*, long)>:
   0:\tldr\tq9, [x0]
   4:\tldr\ts10, [x1], #4
   8:\tfmla\tv0.4s, v9.4s, v10.s[0]
   c:\tfmla\tv1.4s, v9.4s, v10.s[0]
  10:\tfmla\tv2.4s, v9.4s, v10.s[0] // comment
  14:\tfmla\tv3.4s, v9.4s, v10.s[0]
  18:\tcmp\tx1, x2
  1c:\tb.ne\t4 <void attnjourney::(anonymous namespace)::Tile<float>::add<(Kind)0, 8>(float*, long)+0x4>  // b.any
  20:\tstr\tq0, [x0]
  24:\tcbnz\tx3, 0 <void attnjourney::(anonymous namespace)::Tile<float>::add<(Kind)0, 8>(float*, long)>
"""
has_tools = shutil.which("llvm-mca") or shutil.which("llvm-mca-19")


def test_innermost_loops_without_a_store():
    found = main_loops.families(main_loops.main_loops(DISASSEMBLY, least=1))
    assert list(found) == ["Tile::add"]
    (loop,) = found["Tile::add"]
    assert len(loop.instructions) == 6 and len(loop.multiply_adds) == 4
    assert [len(x.instructions) for x in main_loops.innermost_loops(DISASSEMBLY)] == [6, 3]


def test_loops_of_aarch64():
    (loop,) = main_loops.innermost_loops(AARCH64, main_loops.AARCH64)
    assert len(loop.instructions) == 7 and len(loop.multiply_adds) == 4
    assert main_loops.free_multiply_adds(loop)[3] == "fmla\tv3.4s, v30.4s, v15.s[0]"
    (found,) = main_loops.main_loops(AARCH64, main_loops.AARCH64, least=1)
    assert found == loop


@pytest.mark.skipif(not has_tools, reason="no llvm-mca on PATH")
def test_a_chain_waits_on_aarch64():
    (loop,) = main_loops.innermost_loops(AARCH64, main_loops.AARCH64)
    # four pipes; an accumulator is ready again after two cycles
    assert main_loops.share(loop, "neoverse-v2") == pytest.approx(1 / 2, rel=0.1)


@pytest.mark.skipif(not has_tools, reason="no llvm-mca on PATH")
def test_a_chain_waits():
    four, one = main_loops.innermost_loops(DISASSEMBLY)
    assert main_loops.share(one, "skylake-avx512") == pytest.approx(1 / 8, rel=0.1)  # two ports, four cycles each
    assert main_loops.share(four, "skylake-avx512") == pytest.approx(1 / 2, rel=0.1)


def test_objects_by_the_longest_name(tmp_path):
    for name in ("avx512", "avx512_gated", "avx512_bf16", "avx2"):
        (tmp_path / f"{name}.o").touch()
    assert [path.stem for path in main_loops.objects(tmp_path, "avx512")] == ["avx512", "avx512_gated"]
    assert [path.stem for path in main_loops.objects(tmp_path, "avx512_bf16")] == ["avx512_bf16"]


def test_broadcasts_in_words_of_llvm():
    said = main_loops.in_words_of_llvm("vfmadd231ps zmm8,zmm0,DWORD BCST [rsi+rax*4]")
    assert said == "vfmadd231ps zmm8,zmm0,DWORD PTR [rsi+rax*4]{1to16}"
    assert main_loops.in_words_of_llvm("vmulpd ymm1,ymm2,QWORD BCST [rsi]") == "vmulpd ymm1,ymm2,QWORD PTR [rsi]{1to4}"
