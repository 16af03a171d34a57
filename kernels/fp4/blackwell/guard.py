"""The guard of a policy, decided on the device: does a sample of the logits exceed the limit?

`reference.sampled_logit` in one small kernel, so that no attention call waits for the host: up to 128 × 128 evenly
spaced queries and keys of every head, and a flag in device memory that the quantisers of K and V and the forward kernel
read. A block takes 16 queries of one head, a thread one key. The flag starts at 0, and a block sets it to 1 where a
sampled logit exceeds the limit. NaN exceeds nothing; the reference guards no call that has one in its sample, here
another head may still ask for it.

Sums are added channel by channel, one rounding each; a logit within such a rounding of the limit may fall on the other
side of it than in the reference.
"""

import cutlass
import torch
from cuda.bindings import driver
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute

from wanfp4.errors import UnsupportedInputError
from wanfp4.kernels.blackwell import ptx
from wanfp4.kernels.blackwell import quantize_ops as ops

SAMPLES = 128  # queries and keys of a head, as in `reference.sampled_logit`
ROWS = 16  # queries of a block

_HEAD_DIM = 128
_TOGETHER = 4  # queries whose sums a thread carries at once, so that they need not wait for each other
_DTYPES = (torch.bfloat16, torch.float16)


class SampleLogits:
    """The kernel for one dtype of q and k.

    q, k     addresses of [B, S, H, 128] with strides in elements, rows 16-byte aligned
    flag     address of an int32 that is 0
    scale    softmax scale
    limit    largest magnitude of a logit that is no reason to guard
    """

    THREADS = SAMPLES

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in _DTYPES:
            raise UnsupportedInputError(f"the SM100 guard reads torch.bfloat16 and torch.float16, not {dtype}")
        self.kind = "f16" if dtype == torch.float16 else "bf16"

    @cute.jit
    def __call__(
        self,
        q: Int64,
        k: Int64,
        flag: Int64,
        q_batch_stride: Int64,
        q_token_stride: Int64,
        q_head_stride: Int64,
        k_batch_stride: Int64,
        k_token_stride: Int64,
        k_head_stride: Int64,
        batch: Int32,
        heads: Int32,
        queries: Int32,
        keys: Int32,
        scale: Float32,
        limit: Float32,
        stream: driver.CUstream,
    ) -> None:
        self.kernel(
            q, k, flag, q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
            heads, queries, keys, scale, limit,
        ).launch(grid=(batch * heads * (SAMPLES // ROWS), 1, 1), block=(self.THREADS, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: Int64,
        k: Int64,
        flag: Int64,
        q_batch_stride: Int64,
        q_token_stride: Int64,
        q_head_stride: Int64,
        k_batch_stride: Int64,
        k_token_stride: Int64,
        k_head_stride: Int64,
        heads: Int32,
        queries: Int32,
        keys: Int32,
        scale: Float32,
        limit: Float32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        flat_head, part = block // (SAMPLES // ROWS), block % (SAMPLES // ROWS)
        batch, head = flat_head // heads, flat_head % heads
        q = q + 2 * (batch * q_batch_stride + head * q_head_stride)
        k = k + 2 * (batch * k_batch_stride + head * k_head_stride)
        buffer = cute.arch.alloc_smem(Uint32, ROWS * _HEAD_DIM // 2, 16).toint()

        # Eight threads bring a query's 256 bytes to shared memory, all read them from there.
        row, column = thread >> 3, thread & 7
        place = part * ROWS + row
        source = q + 2 * (self.token(place, queries) * q_token_stride) + 32 * column
        for step in cutlass.range_constexpr(2):
            words = ops.load_16_bytes(source + 16 * step, place < queries)
            ops.store_shared(buffer + row * 256 + 32 * column + 16 * step, words)
        source = k + 2 * (self.token(thread, keys) * k_token_stride)
        key = [word for i in range(16) for word in ops.load_16_bytes(source + 16 * i, thread < keys)]
        cute.arch.sync_threads()

        largest = Float32(0)
        for first in cutlass.range(0, cutlass.min(ROWS, queries - part * ROWS), _TOGETHER, unroll=1):
            sums = [Float32(0)] * _TOGETHER
            for part_of_key in cutlass.range_constexpr(16):
                for i in cutlass.range_constexpr(_TOGETHER):
                    query = self.load_shared(buffer + (first + i) * 256 + 16 * part_of_key)
                    sums[i] = self.multiply_add(query, key[4 * part_of_key : 4 * part_of_key + 4], sums[i])
            # Where there is no query or key there are zeros, whose products are 0, or NaN with an infinity.
            for total in sums:
                largest = self.larger(largest, total)
        exceeds = cute.arch.vote_any_sync(self.scaled(largest, scale) > limit)
        if (thread % 32 == 0) & exceeds:
            self.set(flag)

    @cute.jit
    def token(self, place: Int32, tokens: Int32) -> Int32:
        """round(place · (S − 1) / 127), or `place` where all tokens are sampled. 127 is odd: nothing lies halfway."""
        token = place
        if tokens > SAMPLES:
            token = Int32((Uint64(place) * 2 * Uint64(tokens - 1) + (SAMPLES - 1)) // (2 * (SAMPLES - 1)))
        return token

    def load_shared(self, address: Int32) -> list[Uint32]:
        """Four words of a query."""
        return list(ptx.asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", [address], [Uint32] * 4))

    def multiply_add(self, query: list[Uint32], key: list[Uint32], total: Float32) -> Float32:
        """total + eight products of 16-bit floats, added one after the other, each rounded once."""
        lines = ["{\n.reg .b16 a, b, c, d;\n.reg .f32 t;\nmov.f32 t, $9;"]
        for i in range(4):
            lines.append(f"mov.b32 {{a, b}}, ${1 + i};\nmov.b32 {{c, d}}, ${5 + i};")
            lines.append(f"fma.rn.f32.{self.kind} t, a, c, t;\nfma.rn.f32.{self.kind} t, b, d, t;")
        text = "\n".join([*lines, "mov.f32 $0, t;\n}"])
        return ptx.asm(text, [*query, *key, total], [Float32], volatile=False)

    def larger(self, a: Float32, b: Float32) -> Float32:
        """max(a, |b|), a if b is NaN."""
        text = "{\n.reg .f32 b;\nabs.f32 b, $2;\nmax.f32 $0, $1, b;\n}"
        return ptx.asm(text, [a, b], [Float32], volatile=False)

    def scaled(self, largest: Float32, scale: Float32) -> Float32:
        """The product, rounded as it stands."""
        return ptx.asm("mul.rn.f32 $0, $1, $2;", [largest, scale], [Float32], volatile=False)

    def set(self, flag: Int64) -> None:
        """Whoever comes first, it is 1."""
        ptx.asm("st.relaxed.gpu.global.b32 [$0], $1;", [flag, Int32(1)])
