// FP8 attention forward for Hopper (sm_90a): bulk copies, wgmma with E4M3 operands, no exponential with DIRECT.
//
// A block computes 64 queries of one head for each of its consumer warpgroups; one producer thread brings the tiles of
// 128 keys. Tiles' images in memory are those of shared memory (128-byte swizzle), so a tile is one bulk copy.
// Per tile and row, with t = score in octaves above the row's reference, where the anchors' largest score has PEAK less
// the row's headroom:
//
//   P[j]  = E4M3 of 2^(t + d[j/32])      d: exponent of V's block of 32 keys relative to the tile's largest
//   acc   = acc + w·(P·V)                w: the tile's V exponent; P·V starts at 0 for each tile
//   total = total + P·1                  "1" stands in eight more rows of V and is 2^-d
//
// The tensor core keeps about 13 bits of a sum, so sums over tiles are float32 additions in registers.
// The first tile is the anchors. A row's reference is raised by whole octaves where a tile does not fit below 448, which
// P itself shows: its bytes saturate. That takes as long as a tile, so rows get room for what is to be expected.
//
// DIRECT: an E4M3 byte is 8 per octave, so round(8·t + 56) is the byte. 128 + byte lies in one binade of float32, where
// the byte stands in bits 16 to 23: two multiply-adds, of which one saturates, and a byte permutation.
//
// Set by the compiler's command line: DIRECT, STAGES (of K and of V), GROUPS (consumer warpgroups), OVERLAP (scores of
// the next tile beside P·V), PEAK (octaves).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

#define TILE 128
#define K_BYTES (128 * 128)
#define V_ROWS 136
#define V_BYTES (V_ROWS * 128)
#define META 16
#define FULL_MASK 0xffffffffu

struct Shared {
    u8 q[GROUPS][64 * 128];
    u8 k[STAGES][K_BYTES];
    u8 v[STAGES][V_BYTES];
    u64 q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u64* bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(u64* bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nwait:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\nbra wait;\nfinished:\n}" ::"r"(shared_address(bar)),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void bulk_copy(void* to, const void* from, u32 bytes, u64* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(bar))
                 : "memory");
}

// Operand of wgmma: K-major, 128-byte swizzle, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(const void* p) {
    return ((u64)1 << 62) | ((u64)64 << 32) | ((u64)1 << 16) | (u64)((shared_address(p) & 0x3ffff) >> 4);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

template <int N>
__device__ __forceinline__ void pin(float (&r)[N]) {  // uses of r stay behind what stands before
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

#define R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(d, i) R4(d, i), R4(d, i + 4), R4(d, i + 8), R4(d, i + 12)
#define LIST64                                                                                                    \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"  \
    "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
    "%56,%57,%58,%59,%60,%61,%62,%63"

// d [64 x 128] = (accumulate ? d : 0) + a · b, a and b in shared memory
__device__ __forceinline__ void scores_mma(float (&d)[64], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" LIST64 "}, %64, %65, p, 1, 1;\n}"
        : R16(d, 0), R16(d, 16), R16(d, 32), R16(d, 48)
        : "l"(a), "l"(b), "r"(accumulate));
}

// d [64 x 136] = (accumulate ? d : 0) + a · b, a in registers
__device__ __forceinline__ void values_mma(float (&d)[68], const u32* a, u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %73, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {" LIST64
        ",%64,%65,%66,%67}, {%68,%69,%70,%71}, %72, p, 1, 1;\n}"
        : R16(d, 0), R16(d, 16), R16(d, 32), R16(d, 48), R4(d, 64)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ float max_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ u32 pack(float a, float b, float c, float d) {
#if DIRECT
    u32 low = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0062);
    u32 high = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0062);
    return __byte_perm(low, high, 0x5410);
#else
    u32 r;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
        : "=r"(r)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return r;
#endif
}

// What a score becomes: for DIRECT 128 + byte (rounded down when packed), else the probability.
__device__ __forceinline__ float weigh(float s, float factor, float offset) {
#if DIRECT
    return fmaf(__saturatef(fmaf(s, factor, offset)), 127.f, 128.5f);
#else
    return exp2_fast(fmaf(s, factor, offset));
#endif
}

// A thread's two rows: query 16·warp + lane/4 and the one 8 below it.
struct Rows {
    float reference[2];  // octaves
    float total[2];
};

// Largest score of each row in a tile, octaves. NaN stays.
__device__ __forceinline__ void largest(float (&top)[2], const float (&s)[64], const float (&octaves)[4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        top[r] = -__int_as_float(0x7f800000);
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            float block = s[16 * b + 2 * r];
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int c = 0; c < 2; ++c) block = max_nan(block, s[16 * b + 4 * i + 2 * r + c]);
            top[r] = max_nan(top[r], block * octaves[b]);
        }
        top[r] = max_nan(top[r], __shfl_xor_sync(FULL_MASK, top[r], 1));
        top[r] = max_nan(top[r], __shfl_xor_sync(FULL_MASK, top[r], 2));
    }
}

// Whole octaves, 0 to 3, that the largest of many scores may lie above the anchors' largest: were a row normal, what
// their mean and deviation let expect. A key far above the others, an attention sink, widens the deviation but little,
// and such a row, which needs all of P's range below it, gets none.
__device__ __forceinline__ float headroom(float top, const float (&s)[64], const float (&octaves)[4], int r) {
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float x = s[16 * b + 4 * i + 2 * r + c] * octaves[b];
                sum += x, squares = fmaf(x, x, squares);
            }
    sum += __shfl_xor_sync(FULL_MASK, sum, 1), squares += __shfl_xor_sync(FULL_MASK, squares, 1);
    sum += __shfl_xor_sync(FULL_MASK, sum, 2), squares += __shfl_xor_sync(FULL_MASK, squares, 2);
    const float mean = sum / TILE, deviation = sqrtf(fmaxf(squares / TILE - mean * mean, 0.f));
    // The largest of 75,600 normal numbers lies 4.2 deviations above the mean. NaN gives 0.
    return ceilf(fminf(fmaxf(mean + 4.25f * deviation - top, 0.f), 3.f));
}

// P of a tile as operand of wgmma, and whether it saturates. Keys of a group of 16 stand in the order of the
// accumulator: V's image has it, too.
__device__ __forceinline__ bool weights(
    u32 (&p)[16], const Rows& rows, const float (&s)[64], const float (&octaves)[4], const float (&shift)[4]) {
    u32 full = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#if DIRECT
        const float scale = 8.f / 127.f, zero = 56.f / 127.f;
#else
        const float scale = 1.f, zero = 0.f;
#endif
        const float factor = scale * octaves[b];
        const float offset[2] = {fmaf(scale, shift[b] - rows.reference[0], zero),
                                 fmaf(scale, shift[b] - rows.reference[1], zero)};
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = 16 * b + 8 * half + 2 * r;
                const u32 four =
                    pack(weigh(s[i], factor, offset[r]), weigh(s[i + 1], factor, offset[r]),
                         weigh(s[i + 4], factor, offset[r]), weigh(s[i + 5], factor, offset[r]));
                p[4 * b + 2 * half + r] = four;
                full |= four + (DIRECT ? 0x01010101u : 0x02020202u);
            }
    }
    return full & 0x80808080u;
}

// `weights`, with the rows' references raised where the tile does not fit.
__device__ __forceinline__ void fit(
    u32 (&p)[16], Rows& rows, float (&acc)[64], const float (&s)[64], const float (&octaves)[4],
    const float (&shift)[4]) {
    if (__any_sync(FULL_MASK, weights(p, rows, s, octaves, shift))) {
        float top[2], factor[2];
        largest(top, s, octaves);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // 8.80735 is log2 448. NaN makes the row NaN; infinity, too.
            const float raise = top[r] - rows.reference[r] - 8.80735f;
            // More than needed where there is range for it, as the next large score is likely a little larger: DIRECT's
            // range ends three octaves before the exponential's.
            const float more = DIRECT ? 0.f : 3.f;
            const float by = raise <= 0.f ? 0.f : ceilf(raise + more);
            rows.reference[r] += by;
            factor[r] = exp2_fast(-by);
            rows.total[r] *= factor[r];
        }
#pragma unroll
        for (int i = 0; i < 64; ++i) acc[i] *= factor[(i >> 1) & 1];
        weights(p, rows, s, octaves, shift);
    }
}

__device__ __forceinline__ void mask(float (&s)[64], int keys, int lane) {
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (8 * j + 2 * (lane & 3) + (c & 1) >= keys) s[4 * j + c] = -__int_as_float(0x7f800000);
}

__device__ __forceinline__ void add(float (&acc)[64], Rows& rows, const float (&part)[68], float w, float poison) {
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[i] = fmaf(part[i], w, acc[i]);
    rows.total[0] += part[64] + poison, rows.total[1] += part[66] + poison;
}

__device__ __forceinline__ void issue_scores(float (&s)[64], const u8* q, const u8* k) {
    u64 a = descriptor(q), b = descriptor(k);
#pragma unroll
    for (int i = 0; i < 4; ++i) scores_mma(s, a + 2 * i, b + 2 * i, i > 0);
    wgmma_commit();
}

__device__ __forceinline__ void issue_values(float (&part)[68], const u32 (&p)[16], const u8* v) {
    u64 b = descriptor(v);
#pragma unroll
    for (int i = 0; i < 4; ++i) values_mma(part, p + 4 * i, b + 2 * i, i > 0);
    wgmma_commit();
}

// q, k, v   images of tiles: [B·H, tiles, 128 or 136, 128] bytes
// q_octaves [B·H, padded queries / 32]: octaves for a unit of q·k; meta [B·H, key tiles, 16]: 4 scales of K, 4 shifts
//           of V in octaves, the tile's V scale, NaN where K is not finite, else 0
// v_mean    [B·H, 128] added to the result, or null; lse [B·H, queries] natural logarithms, or null
// out       [B, queries, H, 128] BF16, strides in elements
// Launched with ceil(queries / (64·GROUPS)) blocks of 128·(GROUPS + 1) threads for each head.
extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) forward(
    const u8* __restrict__ q, const u8* __restrict__ k, const u8* __restrict__ v, const float* __restrict__ q_octaves,
    const float* __restrict__ meta, const float* __restrict__ v_mean, unsigned short* __restrict__ out,
    float* __restrict__ lse, int heads, int queries, int keys, long long batch_stride, long long token_stride,
    long long head_stride) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int blocks = (queries + 64 * GROUPS - 1) / (64 * GROUPS), k_tiles = (keys + TILE - 1) / TILE;
    const int head = blockIdx.x / blocks, start = (blockIdx.x % blocks) * (64 * GROUPS);
    const int q_padded = (queries + TILE - 1) / TILE * TILE;
    const int warpgroup = __shfl_sync(FULL_MASK, threadIdx.x / 128, 0);

    if (threadIdx.x == 0) {
        barrier_init(&shared.q_full, 1);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&shared.k_full[i], 1);
            barrier_init(&shared.v_full[i], 1);
            barrier_init(&shared.k_empty[i], GROUPS);
            barrier_init(&shared.v_empty[i], GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) {
            const u32 bytes = min(64 * GROUPS, q_padded - start) * 128;
            barrier_expect(&shared.q_full, bytes);
            bulk_copy(shared.q, q + ((long long)head * q_padded + start) * 128, bytes, &shared.q_full);
            const u8* k_from = k + (long long)head * k_tiles * K_BYTES;
            const u8* v_from = v + (long long)head * k_tiles * V_BYTES;
            int stage = 0;
            u32 phase = 1;
            for (int tile = 0; tile < k_tiles; ++tile) {
                barrier_wait(&shared.k_empty[stage], phase);
                barrier_expect(&shared.k_full[stage], K_BYTES);
                bulk_copy(shared.k[stage], k_from + (long long)tile * K_BYTES, K_BYTES, &shared.k_full[stage]);
                barrier_wait(&shared.v_empty[stage], phase);
                barrier_expect(&shared.v_full[stage], V_BYTES);
                bulk_copy(shared.v[stage], v_from + (long long)tile * V_BYTES, V_BYTES, &shared.v_full[stage]);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 240 : 160));
    const int group = warpgroup - 1, thread = threadIdx.x & 127, warp = thread / 32, lane = thread & 31;
    const u8* q_shared = shared.q[group];
    const int first = start + group * 64 + warp * 16;  // query of the warp's first row
    const float my_octaves = q_octaves[((long long)head * q_padded + min(first, q_padded - 1)) / 32];
    const float* meta_from = meta + (long long)head * k_tiles * META;

    float acc[64], s[64], part[68];
    u32 p[16];
    float octaves[4], shift[4], w, poison;
    Rows rows;
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[i] = 0.f;
    rows.total[0] = rows.total[1] = 0.f;

    float4 k_scales, v_shifts;
    float2 v_scale;
    auto fetch = [&](int tile) {  // the numbers of a tile, in time for it
        const float* from = meta_from + (long long)tile * META;
        k_scales = __ldg(reinterpret_cast<const float4*>(from));
        v_shifts = __ldg(reinterpret_cast<const float4*>(from + 4));
        v_scale = __ldg(reinterpret_cast<const float2*>(from + 8));
    };
    auto use = [&]() {
        octaves[0] = k_scales.x * my_octaves, octaves[1] = k_scales.y * my_octaves;
        octaves[2] = k_scales.z * my_octaves, octaves[3] = k_scales.w * my_octaves;
        shift[0] = v_shifts.x, shift[1] = v_shifts.y, shift[2] = v_shifts.z, shift[3] = v_shifts.w;
        w = v_scale.x, poison = v_scale.y;
    };

    const bool ragged = keys % TILE != 0;
    int stage = 0;
    u32 phase = 0;

    // The anchors' scores say what rows are relative to.
    fetch(0);
    barrier_wait(&shared.q_full, 0);
    barrier_wait(&shared.k_full[0], 0);
    wgmma_fence();
    issue_scores(s, q_shared, shared.k[0]);
    wgmma_wait<0>();
    pin(s);
    if (thread == 0) barrier_arrive(&shared.k_empty[0]);
    if (ragged && k_tiles == 1) mask(s, keys, lane);
    use();
    largest(rows.reference, s, octaves);
#pragma unroll
    for (int r = 0; r < 2; ++r)
        rows.reference[r] -= PEAK - (k_tiles > 1 ? headroom(rows.reference[r], s, octaves, r) : 0.f);
    weights(p, rows, s, octaves, shift);
#if OVERLAP
    int next = 0;
    u32 next_phase = 0;
    for (int tile = 1; tile < k_tiles; ++tile) {
        fetch(tile);
        if (++next == STAGES) next = 0, next_phase ^= 1;
        barrier_wait(&shared.k_full[next], next_phase);
        barrier_wait(&shared.v_full[stage], phase);
        wgmma_fence();
        issue_scores(s, q_shared, shared.k[next]);
        issue_values(part, p, shared.v[stage]);
        wgmma_wait<0>();
        pin(s);
        pin(part);
        if (thread == 0) barrier_arrive(&shared.k_empty[next]), barrier_arrive(&shared.v_empty[stage]);
        if (ragged && tile + 1 == k_tiles) mask(s, keys - tile * TILE, lane);
        add(acc, rows, part, w, poison);
        use();
        fit(p, rows, acc, s, octaves, shift);
        stage = next, phase = next_phase;
    }
    barrier_wait(&shared.v_full[stage], phase);
    wgmma_fence();
    issue_values(part, p, shared.v[stage]);
    wgmma_wait<0>();
    pin(part);
    add(acc, rows, part, w, poison);
#else
    for (int tile = 1;; ++tile) {
        if (tile < k_tiles) fetch(tile);
        barrier_wait(&shared.v_full[stage], phase);
        wgmma_fence();
        issue_values(part, p, shared.v[stage]);
        wgmma_wait<0>();
        pin(part);
        if (thread == 0) barrier_arrive(&shared.v_empty[stage]);
        if (++stage == STAGES) stage = 0, phase ^= 1;
        add(acc, rows, part, w, poison);
        if (tile == k_tiles) break;
        barrier_wait(&shared.k_full[stage], phase);
        wgmma_fence();
        issue_scores(s, q_shared, shared.k[stage]);
        wgmma_wait<0>();
        pin(s);
        if (thread == 0) barrier_arrive(&shared.k_empty[stage]);
        if (ragged && tile + 1 == k_tiles) mask(s, keys - tile * TILE, lane);
        use();
        fit(p, rows, acc, s, octaves, shift);
    }
#endif

    const long long base = (head / heads) * batch_stride + (head % heads) * head_stride;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int query = first + lane / 4 + 8 * r;
        if (query >= queries) continue;
        const float inverse = 1.f / rows.total[r];
        unsigned short* to = out + base + query * token_stride + 2 * (lane & 3);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            float a = acc[4 * j + 2 * r] * inverse, b = acc[4 * j + 2 * r + 1] * inverse;
            if (v_mean != nullptr) {
                const float2 mean = *reinterpret_cast<const float2*>(v_mean + head * 128 + 8 * j + 2 * (lane & 3));
                a += mean.x, b += mean.y;
            }
            u32 both;
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
            *reinterpret_cast<u32*>(to + 8 * j) = both;
        }
        if (lse != nullptr && (lane & 3) == 0)
            lse[(long long)head * queries + query] = (rows.reference[r] + log2f(rows.total[r])) * 0.69314718056f;
    }
}
