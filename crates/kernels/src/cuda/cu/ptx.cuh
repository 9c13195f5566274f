// The machine as kernels see it: types, threads, and one function an instruction. Inline assembly is here, in hopper.cuh and in cluster.cuh alone.
//
// Kernels use what is declared here and nothing else, so that the same text is compiled by NVRTC for a device and, with
// MSTAR_EMULATED, by a host compiler for the emulator (emulator/emulated.hpp declares the same names). Rules that make that
// possible: a kernel has one parameter, all shared memory is dynamic, warp collectives are called by all 32 lanes together.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// 16 bytes, moved at once.
struct alignas(16) U4 {
    u32 x, y, z, w;
};

// A bf16 and an f16, as bits.
struct Bf16 {
    u16 bits;
};
struct F16 {
    u16 bits;
};

#ifdef MSTAR_EMULATED
#include "emulated.hpp"
#else

#define DEVICE __device__ __forceinline__
// A kernel is what follows, behind `after_earlier`: whichever it is, it may be launched before those ahead of it have ended.
#define MSTAR_KERNEL(NAME, PARAMS, THREADS, MIN_BLOCKS) MSTAR_KERNEL_AS(NAME, PARAMS, __launch_bounds__(THREADS, MIN_BLOCKS))
// The same, CLUSTER blocks along x at once on neighbouring multiprocessors, which reach each other's shared memory (cluster.cuh).
#define MSTAR_KERNEL_OF_CLUSTERS(NAME, PARAMS, THREADS, MIN_BLOCKS, CLUSTER)                                         \
    MSTAR_KERNEL_AS(NAME, PARAMS, __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, MIN_BLOCKS))
#define MSTAR_KERNEL_AS(NAME, PARAMS, HOW)                                                                           \
    DEVICE void NAME##__body(const PARAMS& p);                                                                       \
    extern "C" __global__ void HOW NAME(const __grid_constant__ PARAMS p) {                                          \
        after_earlier();                                                                                             \
        NAME##__body(p);                                                                                             \
    }                                                                                                                \
    DEVICE void NAME##__body(const PARAMS& p)
#define SHARED(NAME) extern __shared__ __align__(1024) u8 NAME[]
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")

// Waits until the kernels ahead in the stream have ended and what they wrote is seen: a kernel that begins early is there by then. One that
// lets the next one begin before its own blocks end (griddepcontrol.launch_dependents) made all chains slower: docs/perf-notes.md.
DEVICE void after_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- threads ----
DEVICE u32 thread_x() { return threadIdx.x; }
DEVICE u32 threads() { return blockDim.x; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 block_z() { return blockIdx.z; }
DEVICE u32 grid_x() { return gridDim.x; }
DEVICE u32 grid_y() { return gridDim.y; }
DEVICE void block_sync() { __syncthreads(); }
// A barrier of `count` threads (whole warps); `id` 1..15, a constant.
DEVICE void named_sync(u32 id, u32 count) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory"); }
DEVICE void warp_sync() { __syncwarp(); }
// Whether some thread of the block says so; a barrier too.
DEVICE bool block_any(bool said) { return __syncthreads_or(said); }

// ---- warp collectives ----
DEVICE float shfl_xor(float v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DEVICE u32 shfl_xor(u32 v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DEVICE i32 shfl_xor(i32 v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DEVICE float shfl_idx(float v, u32 lane) { return __shfl_sync(0xffffffffu, v, lane); }
DEVICE u32 shfl_idx(u32 v, u32 lane) { return __shfl_sync(0xffffffffu, v, lane); }
DEVICE i32 shfl_idx(i32 v, u32 lane) { return __shfl_sync(0xffffffffu, v, lane); }
// From `by` lanes below; lanes below `by` keep their own.
DEVICE u32 shfl_up(u32 v, u32 by) { return __shfl_up_sync(0xffffffffu, v, by); }
DEVICE u32 ballot(bool said) { return __ballot_sync(0xffffffffu, said); }
DEVICE bool warp_any(bool said) { return __any_sync(0xffffffffu, said); }
DEVICE bool warp_all(bool said) { return __all_sync(0xffffffffu, said); }
// Lanes whose `v` is this lane's.
DEVICE u32 match_any(u32 v) { return __match_any_sync(0xffffffffu, v); }
DEVICE u32 warp_add(u32 v) { return __reduce_add_sync(0xffffffffu, v); }
DEVICE u32 warp_max(u32 v) { return __reduce_max_sync(0xffffffffu, v); }

// ---- arithmetic ----
DEVICE u32 popcount(u32 v) { return __popc(v); }
DEVICE u32 leading_zeros(u32 v) { return __clz(v); }
// `v`, of which the compiler knows nothing: what follows from it is computed again rather than kept in registers.
DEVICE u32 opaque(u32 v) {
    u32 r;
    asm volatile("mov.b32 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}
// 1-based index of the lowest set bit; 0 for none.
DEVICE u32 lowest_bit(u32 v) { return __ffs(v); }
DEVICE u32 float_bits(float v) { return __float_as_uint(v); }
DEVICE float bits_float(u32 v) { return __uint_as_float(v); }
DEVICE float infinity() { return __uint_as_float(0x7f800000u); }
// 2^v, subnormal results as 0.
DEVICE float ex2(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
// 1 / v within one unit in the last place, of an infinity 0.
DEVICE float reciprocal(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
// The larger of two; of a NaN and a number, the number.
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
// What lies at `at`, loaded here and no sooner: loads that wait side by side take a register each.
DEVICE float load_here(const float* at) {
    float r;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(r) : "l"(at));
    return r;
}
DEVICE u32 load_here(const u32* at) {
    u32 r;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(r) : "l"(at));
    return r;
}
DEVICE float lg2(float v) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
// a b + c, rounded once.
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// Within two units in the last place, where tanh.approx has 11 bits.
DEVICE float tanh_exact(float v) { return tanhf(v); }
DEVICE float to_float(Bf16 v) { return __uint_as_float(u32(v.bits) << 16); }
DEVICE float to_float(F16 v) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v.bits));
    return r;
}
DEVICE float to_float(float v) { return v; }
// `lo` in the lower half, both rounded to nearest even.
template <class T>
DEVICE u32 pack(float lo, float hi);
template <>
DEVICE u32 pack<Bf16>(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
template <>
DEVICE u32 pack<F16>(float lo, float hi) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
template <class T>
DEVICE T from_float(float v);
template <>
DEVICE Bf16 from_float<Bf16>(float v) {
    return Bf16{u16(pack<Bf16>(v, 0.0f) & 0xffffu)};
}
template <>
DEVICE F16 from_float<F16>(float v) {
    return F16{u16(pack<F16>(v, 0.0f) & 0xffffu)};
}
template <>
DEVICE float from_float<float>(float v) {
    return v;
}
// Two bf16 times two, each product rounded to nearest even; subnormals are numbers.
DEVICE u32 multiply_bf16(u32 a, u32 b) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
    return r;
}
// Four bytes, the i-th being that which nibble i of `which` names: 0 to 3 of `v`, 4 for 0.
DEVICE u32 permuted(u32 v, u32 which) { return __byte_perm(v, 0, which); }
// The same of two words: 4 to 7 name those of the second.
DEVICE u32 permuted(u32 v, u32 w, u32 which) { return __byte_perm(v, w, which); }
// e4m3 (no infinity, saturating, NaN kept) and back.
DEVICE u8 to_e4m3(float v) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.0f), "f"(v));
    return u8(r & 0xff);
}

// ---- memory ----
DEVICE U4 load16(const void* from) { return *reinterpret_cast<const U4*>(from); }
// Read once, never written while the kernel runs; leaves the first-level cache alone.
DEVICE U4 load16_once(const void* from) {
    U4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(from));
    return r;
}
// Asks for the 128-byte line around an address to be brought into the second-level cache.
DEVICE void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
// Past the first-level cache, which may hold what lay there before another block wrote.
DEVICE U4 load16_fresh(const void* from) {
    U4 r;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(from)
                 : "memory");
    return r;
}
DEVICE float load_fresh(const float* from) {
    float r;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(r) : "l"(from) : "memory");
    return r;
}
DEVICE void store16(void* to, U4 v) { *reinterpret_cast<U4*>(to) = v; }
DEVICE u32 atomic_add(u32* at, u32 v) { return atomicAdd(at, v); }
DEVICE u32 atomic_max(u32* at, u32 v) { return atomicMax(at, v); }
// Adds 1 with acquire and release order for the whole device; the value before.
DEVICE u32 take_ticket(u32* at) {
    u32 r;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(r) : "l"(at) : "memory");
    return r;
}
DEVICE void device_fence() { __threadfence(); }
DEVICE u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// 16 bytes from global to shared memory, both 16-byte aligned; zeros when not `valid`, and nothing is read then.
DEVICE void cp_async_16(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
// 4 bytes, both 4-byte aligned.
DEVICE void cp_async_4(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's groups are under way.
template <u32 N>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- matrices ----
// Lane l names row l % 8 of 8 x 8 matrix l / 8 (16 bytes, aligned). Register i holds, of matrix i, the elements
// (l / 4, 2 (l % 4)) and the one right of it.
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}
// As above, of the transposed matrices.
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}
// An 8 x 8 matrix transposed: lane l has, and gets, the elements (l / 4, 2 (l % 4)) and the one right of it.
DEVICE u32 transposed(u32 v) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}
// c[16 x 8] += a[16 x 16] b[16 x 8], f32 sums. With g = lane / 4, t = lane % 4:
//   a[0] = (g, 2t..), a[1] = (g + 8, 2t..), a[2] = (g, 2t + 8..), a[3] = (g + 8, 2t + 8..);  (row, column), two columns each
//   b[0] = (2t.., g), b[1] = (2t + 8.., g);                                               (row k, column n), two k each
//   c[0], c[1] = (g, 2t), (g, 2t + 1); c[2], c[3] = the same of row g + 8.
template <class T>
DEVICE void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]);
template <>
DEVICE void mma<Bf16>(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
DEVICE void mma<F16>(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

DEVICE u32 lane() { return thread_x() % 32; }
DEVICE u32 warp() { return thread_x() / 32; }
template <class T>
DEVICE T least(T a, T b) {
    return a < b ? a : b;
}
template <class T>
DEVICE T most(T a, T b) {
    return a > b ? a : b;
}
// An e4m3 byte as a float; 0x7f and 0xff are NaN.
DEVICE float from_e4m3(u8 v) {
    u32 sign = u32(v & 0x80) << 24, exponent = (v >> 3) & 15, mantissa = v & 7;
    if (exponent == 15 && mantissa == 7) return bits_float(0x7fc00000u | sign);
    if (exponent == 0) return bits_float(sign | float_bits(float(mantissa) * 0.001953125f));
    return bits_float(sign | (exponent + 120) << 23 | mantissa << 20);
}
