"""What the parts of the forward kernel agree on: its options, and where things are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cutlass import Float32, Int32, Int64

ROWS = 128  # queries of a stage, keys of a tile, channels
THREADS = 384  # three warpgroups: softmax of each stage; MMA, load and two idle warps
LAUNCH_REGISTERS = 168  # a thread, what the compiler gives 384 threads; setmaxnreg moves them about, and no more
SOFTMAX_REGISTERS, OTHER_REGISTERS = 232, 40
SOFTMAX_WARPS, MMA_WARP, LOAD_WARP = 8, 8, 9
assert 2 * SOFTMAX_REGISTERS + OTHER_REGISTERS <= 3 * LAUNCH_REGISTERS  # else a warpgroup waits for more, for ever
CODES = ROWS * ROWS // 2  # bytes of a tile's codes
PAGE = 512  # bytes of 128 × 4 scales
SLOT = CODES + 2 * PAGE  # of shared memory: a record with up to two pages, a multiple of the swizzle's 1024 bytes

LOG2_6 = math.log2(6)
DIRECT_ROUNDING = 0.41504
MAGIC = 1.5 * 2**23  # added with rounding down, it leaves the floor in the low bits
MAGIC_BITS = 0x4B400000
TARGET, CEILING = 120, 215  # stored exponents: of a row's first tile, and the largest accepted before rescaling
FLOOR = -(2.0**21)  # octaves: no block's largest counts as less; keys beyond the end have twice that, and get code 0
TABLE_WORD = 0x03020100  # doubled values of the codes 0 to 3; those of 4 to 7 are in `ptx.codes`

# Offsets into dynamic shared memory. Barriers of a stage are 8 bytes apart.
Q_FULL, Q_EMPTY, S_FULL, S_FREE, P_FULL, O_DONE = (16 * i for i in range(6))
KV_FULL, KV_EMPTY = 128, 256
TENSOR_ADDRESS, TABLE = 384, 512  # TABLE: a word for each lane
P_PAGES = 1024
Q = 4096
KV = Q + 2 * SLOT

# Offsets into a bank of tensor memory; K's scales follow Q's.
K_SCALES, V_SCALES, P_SCALES, P_CODES = 8, 16, 32, 64
OUTPUT = 256  # columns from a bank to its stage's O


@dataclass(frozen=True)
class Options:
    """Everything that is compiled in.

    classifier     "affine", "two-piece", "exp2" or "mix", with its coefficients
    row_reference  "shiftless", "anchor32", "anchor128", "rowmax", or "guarded": a flag in memory says anchor128 where
                   it is not 0, and shiftless where it is
    p              "mxfp4-direct": one power of two for 32 keys; "nvfp4": UE4M3 for 16, of P and V, with "rowmax" only
    p_peak         for "nvfp4": what the row's maximum is scaled to
    folded         Q and K have one scale page a tile, not two
    out            "bf16", "f16" or, to look closely, "f32"
    lse, v_mean    whether the log-sum-exp is written, and channel means are added to the output
    slots          K and V tiles that shared memory holds
    in_order       rely on the tensor core working in the order of issue, as NVIDIA's kernels do. Otherwise wait for
                   each P V before the scores that overwrite its P: slower, and nothing beyond the PTX ISA

    Raises ValueError for combinations that there are not.
    """

    classifier: str = "affine"
    A: float = 1.6
    B: float = 0.95
    A2: float = 0.0
    B2: float = 0.0
    density: int = 0
    row_reference: str = "shiftless"
    p: str = "mxfp4-direct"
    p_peak: float = 256.0
    folded: bool = True
    out: str = "bf16"
    lse: bool = False
    v_mean: bool = False
    slots: int = 12
    in_order: bool = True

    def __post_init__(self) -> None:
        choices = {
            "classifier": ("affine", "two-piece", "exp2", "mix"),
            "row_reference": ("shiftless", "anchor32", "anchor128", "rowmax", "guarded"),
            "p": ("mxfp4-direct", "nvfp4"),
            "out": ("bf16", "f16", "f32"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; there are {', '.join(known)}")
        if self.p == "nvfp4" and (self.row_reference != "rowmax" or self.classifier == "mix"):
            raise ValueError("NVFP4 P needs the row maximum as reference, and no mix of classifiers")

    @property
    def qk_record(self) -> int:
        """Bytes of a tile of Q or K."""
        return CODES + PAGE * (1 if self.folded else 2)

    @property
    def p_pages(self) -> int:
        """Pages of scales of a tile of P and of V."""
        return 1 if self.p == "mxfp4-direct" else 2

    @property
    def v_record(self) -> int:
        """Bytes of a tile of V."""
        return CODES + PAGE * self.p_pages

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        return KV + self.slots * SLOT


@dataclass(frozen=True)
class Place:
    """Where a softmax thread works, and what it keeps.

    bank      its stage's bank in its lanes of tensor memory
    barriers  shared memory, moved so that its stage's barriers are at `S_FULL`, `S_FREE` …
    page      its word of the scale page
    lowest    score below which no block's largest counts
    maps      pairs of equal floats: scale, and scale times the classifier's slopes
    table     `TABLE_WORD`
    guard     the flag of "guarded"
    """

    lane: Int32
    bank: Int32
    barriers: Int32
    page: Int32
    lowest: Float32
    maps: tuple[Int64, Int64, Int64]
    table: Int32
    guard: Int32


@dataclass(frozen=True)
class Arguments:
    """The kernel's run-time arguments (see `forward.Forward`), and what follows from them.

    q_tiles, k_tiles  of 128 tokens; pairs of query tiles a head; jobs in all
    """

    q: Int64
    k: Int64
    v: Int64
    out: Int64
    lse: Int64
    v_mean: Int64
    guard: Int64
    batch_heads: Int32
    heads: Int32
    queries: Int32
    keys: Int32
    stride_b: Int64
    stride_s: Int64
    stride_h: Int64
    scale: Float32
    margin: Float32
    q_tiles: Int32
    k_tiles: Int32
    pairs: Int32
    jobs: Int32


def mix_pairs(block: int, density: int) -> int:
    """Bits of the 16 pairs of a block that take an exponential; `block` is its place in 128 keys (docs/numerics.md)."""
    pairs = {block, block + 8, 4, 12}
    if density >= 2:
        pairs |= {(block + 2) & 3, 6, 8 + ((block + 2) & 3), 14}
    return 0xFFFF if density == 4 else sum(1 << pair for pair in pairs)
