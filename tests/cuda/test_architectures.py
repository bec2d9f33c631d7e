"""Which CUDA kernel a call takes, on GPUs that are not here: the list in csrc/cuda/architectures.cu against the rules
that docs/cuda.md states."""

import itertools
import subprocess

import pytest

from tests.emulator.host import build

TYPES = ["bf16", "fp16", "fp32", "fp64"]  # ElementType
GPUS = [(80, 163), (86, 99), (87, 163), (89, 99), (90, 227), (100, 227), (120, 99)]  # capability, KB for a block
GPUS += [(80, 227)]  # ATTNJOURNEY_CUDA_ARCH=80 on Hopper
DIMS = [1, 64, 65, 128, 129, 192, 193, 256, 257, 512]
LENGTHS = [0, 1, 127, 128, 3000]


@pytest.fixture(scope="module")
def choose(tmp_path_factory):
    if build.unsupported():
        pytest.skip(build.unsupported())
    program = tmp_path_factory.mktemp("architectures") / "architectures"
    sources = [build.ROOT / "tests/cuda/architectures.cpp", build.ROOT / "csrc/cuda/architectures.cu"]
    flags = ["-std=c++20", f"-I{build.ROOT / 'csrc'}", "-x", "c++", "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run([build.CXX, *flags, *map(str, sources), "-o", str(program)], check=True)

    def run(what, cases):
        lines = "\n".join(" ".join(str(int(x)) for x in case) for case in cases)
        text = "".join(f"{what} {line}\n" for line in lines.split("\n"))
        done = subprocess.run([str(program)], input=text, capture_output=True, text=True, check=True)
        return [line.split() for line in done.stdout.splitlines()]

    return run


def forward_rule(capability, dtype, head_dim, v_head_dim, q_len, kv_len, full):
    if dtype == "fp64":
        return "fp64_forward"
    hopper = capability == 90
    if dtype == "fp32":
        halves = max(head_dim, v_head_dim) <= 128 and min(q_len, kv_len) >= 128
        return "sm90_fp16x2_forward" if hopper and halves and not full else "fp32_forward"
    if max(head_dim, v_head_dim) > 256:
        return "sm80_wide_forward"
    own = hopper and kv_len > 0
    return ("sm90" if own else "sm80") + ("_full" if full else "") + "_forward"


def backward_rule(capability, dtype, head_dim, v_head_dim, q_len, kv_len, full):
    if dtype == "fp64":
        return "fp64_backward"
    small = max(head_dim, v_head_dim) <= 128
    if dtype == "fp32":
        return "fp16x2_backward" if small and min(q_len, kv_len) >= 128 and not full else "fp32_backward"
    if max(head_dim, v_head_dim) > 256:
        return "sm80_wide_backward"
    hopper = capability == 90 and kv_len > 0
    if hopper and not small:
        parts = not full and head_dim <= 192 and v_head_dim <= 128
        return "sm90_parts_backward" if parts else f"sm90{'_full' if full else ''}_columns_backward"
    return ("sm90" if hopper else "sm80") + ("_full" if full else "") + "_backward"


def tiles_rule(name, dtype, dim, shared):
    """Rows and keys of the backward's tiles, the rows that its scratch is a multiple of, and its columns."""
    if name == "sm90_parts_backward":
        return [64, 128, 64, 192]
    if name.endswith("_columns_backward"):
        return [64, 64, 64, 256]
    if name == "sm80_wide_backward":
        return [16, 32, 16, 512]
    dim = next(d for d in (64, 128, 256) if dim <= d)
    small = shared < 163
    if dtype in ("bf16", "fp16"):
        keys = 128 if dim < 256 and name != "sm80_full_backward" else 32 if dim == 256 and small else 64
        return [8192 // dim, keys, 8192 // dim, dim]
    kilobytes = dim * (8 if dtype == "fp64" else 4) // 256  # rows of 256 bytes
    rows = 32 if kilobytes == 1 else 8 if small and dtype == "fp64" and dim > 64 else 16
    keys = {1: 64, 2: 64, 4: 32, 8: 16}[kilobytes]
    return [rows, keys, rows if dtype == "fp64" else max(rows, 4096 // dim), dim]


def test_attention(choose):
    grid = list(itertools.product(GPUS, range(4), DIMS, DIMS, LENGTHS, LENGTHS, (False, True)))
    grid = [case for case in grid if case[1] < 2 or max(case[2:4]) <= 256]  # float32 and float64 are refused above
    found = choose("attention", [(*gpu, *case) for gpu, *case in grid])
    assert len(found) == len(grid)
    for ((capability, shared), number, *case), (forward, backward, *tiles) in zip(grid, found):
        dtype = TYPES[number]
        where = f"capability {capability}, {dtype}, {case}"
        assert forward == forward_rule(capability, dtype, *case), where
        assert backward == backward_rule(capability, dtype, *case), where
        assert [int(x) for x in tiles] == tiles_rule(backward, dtype, max(case[:2]), shared), where


def test_sparse_attention(choose):
    """No tile of 512 columns is there: what is wider than 256 stays with the kernels for any width."""
    grid = [(*dims, next((x for x in (64, 128, 256) if x >= max(dims)), 0)) for dims in itertools.product(DIMS, DIMS)]
    found = choose("sparse", [(80, 163, 0, *dims) for *dims, _ in grid])
    assert [int(x) for (x,) in found] == [columns for *_, columns in grid]


def test_splits_of_decoding(choose):
    """One sequence fills 100 multiprocessors, with as many blocks each as shared memory and registers allow."""
    grid = list(itertools.product(GPUS, range(4), (1 << 24,), (20, 48, 98), (1, 3)))
    found = choose("splits", [(*gpu, 0, 1 + n, keys, kilobytes << 10, most) for gpu, n, keys, kilobytes, most in grid])
    for ((_, shared), n, _, kilobytes, most), (splits,) in zip(grid, found):
        blocks = max(1, min(most, (shared + 1) // (kilobytes + 1)))
        assert int(splits) == min(512, -(-400 * blocks // (1 + n))), (shared, n, kilobytes, most)


def test_groups_of_decoding(choose):
    """Blocks of all sequences' keys fill rounds of 100 multiprocessors, four at most; a group has two tiles or more."""
    cases = [  # sequences, tiles of rows, keys, groups
        (64, 2, 4096, 50),
        (1, 1, 100000, 100),
        (8, 3, 8192, 33),
        (1, 2, 640, 5),
        (1, 1, 1, 1),
        (30, 70, 8192, 4),  # 280 blocks in three rounds
        (30, 100, 8192, 1),
        (30, 150, 8192, 2),
        (30, 500, 8192, 1),
    ]
    found = choose("groups", [(90, 227, 0, *case) for *case, _ in cases])
    assert [int(x) for (x,) in found] == [groups for *_, groups in cases]


def test_last_blocks_join(choose):
    """Parts of up to 128 KB, of as many units as there are counters, by kernels that can."""
    cases = [  # units, rows, splits, v_head_dim, whether the kernel can; whether its last block joins
        (8, 4, 33, 128, True, True),
        (8, 4, 33, 128, False, False),
        (8, 4, 1, 128, True, False),
        (8, 16, 16, 128, True, True),
        (8, 16, 17, 128, True, False),
        (8, 64, 16, 128, True, True),  # 16 rows a tile
        (1024, 4, 2, 128, True, True),
        (1025, 4, 2, 128, True, False),
    ]
    found = choose("joins", [(90, 227, 0, *case) for *case, _ in cases])
    assert [bool(int(x)) for (x,) in found] == [case[-1] for case in cases]


def test_many_rows_of_decoding(choose):
    """Keys are split where attention's kernels would have blocks for a part of 100 multiprocessors alone, or where few
    rows of each head fill a part of a block; not in long prompts, nor over few keys."""
    hopper, ampere = (90, 227), (80, 163)
    cases = [  # key heads of all sequences, group, rows, keys, and whether they are split
        (hopper, 8, 1, 128, 32768, True),
        (hopper, 24, 1, 128, 32768, True),
        (hopper, 25, 1, 128, 32768, False),  # 50 tiles of 64 rows
        (hopper, 8, 1, 128, 1000, False),
        (hopper, 1, 8, 512, 32768, False),  # 64 tiles of 64 rows, 32 blocks
        (hopper, 64, 8, 17, 8192, True),  # 512 blocks with 17 rows each
        (hopper, 64, 8, 64, 8192, False),
        (hopper, 64, 1, 4096, 8192, False),
        (ampere, 8, 1, 128, 32768, True),
        (ampere, 64, 8, 64, 8192, False),
    ]
    found = choose("many", [(*gpu, 0, *case) for gpu, *case, _ in cases])
    assert [bool(int(x)) for (x,) in found] == [case[-1] for case in cases]


def test_blocks_in_clusters(choose):
    """Where two tiles of a key head make a pair, tiles fill 100 multiprocessors, 512 keys or more are seen, and the
    device runs clusters on all multiprocessors but one at most."""
    cases = [  # tiles of a query head, heads of a key head, tiles of all, keys, blocks in clusters at a time; blocks
        (64, 1, 1024, 8192, 100, 100),
        (2, 1, 100, 512, 100, 100),
        (2, 1, 98, 512, 100, 0),
        (2, 1, 98, 512, 98, 0),  # and two are idle
        (64, 1, 1024, 511, 100, 0),
        (63, 1, 63 * 16, 8192, 100, 0),  # the last tile of a head is alone
        (63, 4, 63 * 16, 8192, 100, 100),  # with the first one of the next head, whose keys are the same
        (63, 3, 63 * 18, 8192, 100, 0),
        (1, 8, 128, 8192, 100, 100),
        (64, 1, 1024, 8192, 0, 0),  # it runs none
        (64, 1, 1024, 8192, 200, 100),
    ]
    found = choose("pairs", [(90, 227, 0, *case) for *case, _ in cases])
    assert [int(x) for (x,) in found] == [case[-1] for case in cases]


def test_latents(choose):
    """Hopper's own kernel: without a mask, for latents of more than 256 numbers in whole chunks and not in bytes, and
    many rows."""
    flags = itertools.product((False, True), repeat=4)  # chunked, masked, near, bytes
    grid = list(itertools.product(GPUS, range(4), (1, 16, 17, 32, 33, 200), (64, 256, 257, 512), flags))
    found = choose("latents", [(*gpu, number, rows, dim, *more) for gpu, number, rows, dim, more in grid])
    for ((capability, shared), number, rows, dim, (chunked, masked, near, stored)), (name,) in zip(grid, found):
        if number >= 2 or not chunked:
            expected = "fma_latents"
        elif capability == 90 and rows > 16 and dim > 256 and not masked and near and not stored:
            expected = "sm90_latents"
        else:
            expected = "sm80_latents_64_rows" if rows > 32 and shared > 99 else "sm80_latents_32_rows"
        assert name == expected, (capability, TYPES[number], rows, dim, chunked, masked, near, stored)
