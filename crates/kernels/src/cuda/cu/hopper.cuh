// The instructions that Hopper has and others have not: products of a whole warpgroup out of shared memory, and marks that copies
// arrive at. What includes it compiles for sm_90a, and for the emulator.
//
// A *group* is 128 threads from a multiple of 128 on; what is said of a group is called by all of it together.
#pragma once
#include "ptx.cuh"

// A barrier in shared memory. A phase has passed when `count` arrivals have come; phases count 0, 1, 0, 1 ..
struct alignas(8) Mark {
    u64 state;
};

// What a tensor looks like from a distance (cuda/tensor_map.rs), as a member of a kernel's parameter; 64-byte aligned.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

#ifdef MSTAR_EMULATED
#include "emulated_hopper.hpp"
#else

// ---- marks ----
// By one thread, which then says `marks_ready`, before a block_sync.
DEVICE void mark_init(Mark* mark, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(mark)), "r"(count) : "memory");
}
DEVICE void marks_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mark_arrive(Mark* mark) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(mark)) : "memory");
}
// Arrives once all cp.async of this thread so far have landed. The arrival is one of the mark's count.
DEVICE void mark_arrive_after_copies(Mark* mark) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(mark)) : "memory");
}
// Arrives, and says that so many bytes of boxes are to land before the phase passes, those beyond a tensor's end included.
DEVICE void mark_arrive_expecting(Mark* mark, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(mark)), "r"(bytes) : "memory");
}
// Waits until the phase of this parity has passed; of a fresh mark that of parity 1 has.
DEVICE void mark_wait(Mark* mark, u32 parity) {
    u32 passed, at = shared_address(mark);
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(passed)
                     : "r"(at), "r"(parity)
                     : "memory");
    } while (!passed);
}
// Whether the phase of this parity has passed, without waiting.
DEVICE bool mark_passed(Mark* mark, u32 parity) {
    u32 passed;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(passed)
                 : "r"(shared_address(mark)), "r"(parity)
                 : "memory");
    return passed;
}
// Arrives at a named barrier of `count` threads, where others wait, and goes on.
DEVICE void named_arrive(u32 id, u32 count) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory"); }

// ---- boxes ----
// Copies the box of a map whose first element is (z, y, x), x innermost and a multiple of 16 bytes (another one is an illegal instruction), to
// shared memory, from a multiple of 128 bytes on (of 1024 where its pieces are permuted); its bytes are counted at `mark`. What is beyond the
// tensor is zeros. By one thread; what it overwrites was read by products, or fenced.
DEVICE void box_2d(void* to, const TensorMap& map, i32 x, i32 y, Mark* mark) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     shared_address(to)),
                 "l"(&map), "r"(x), "r"(y), "r"(shared_address(mark))
                 : "memory");
}
DEVICE void box_3d(void* to, const TensorMap& map, i32 x, i32 y, i32 z, Mark* mark) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
                     shared_address(to)),
                 "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(mark))
                 : "memory");
}
DEVICE void box_4d(void* to, const TensorMap& map, i32 x, i32 y, i32 z, i32 w, Mark* mark) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
                     shared_address(to)),
                 "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(mark))
                 : "memory");
}
// Asks for a map to be at hand before its first box.
DEVICE void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// One lane of a whole warp; the compiler knows that it is one, so that what it does is no loop over lanes.
DEVICE bool elected() {
    u32 r;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(r));
    return r;
}

// ---- groups ----
// This thread's group, which the compiler knows to be the same in a warp.
DEVICE u32 group_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); }
// The group asks for more registers a thread, once others have given some away. N is a multiple of 8.
template <u32 N>
DEVICE void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <u32 N>
DEVICE void registers_fewer() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- products ----
// What this thread wrote to shared memory is seen by products that are started behind a barrier from here on.
DEVICE void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Before the first product that reads registers which were written otherwise.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a batch of products.
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N batches are under way.
template <u32 N>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Sums that nothing moves across here.
template <u32 N>
DEVICE void pin(float (&d)[N]) {
    UNROLL
    for (u32 i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// A number that nothing which is made of it moves across here: made anew, it takes no registers over a loop.
DEVICE void pin(u64& of) { asm volatile("" : "+l"(of)::"memory"); }

// The sums as operands: their places in the text, and the list of them.
#define SUMS_4 "%0, %1, %2, %3"
#define SUMS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUMS_16 SUMS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_32 SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_40 SUMS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SUMS_48 SUMS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS_64 \
    SUMS_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_128 \
    SUMS_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define OUT_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT_8(i) OUT_4(i), OUT_4(i + 4)
#define OUT_16(i) OUT_8(i), OUT_8(i + 8)
#define OUT_32(i) OUT_16(i), OUT_16(i + 16)
#define OUT_40(i) OUT_32(i), OUT_8(i + 32)
#define OUT_48(i) OUT_32(i), OUT_16(i + 32)
#define OUT_64(i) OUT_32(i), OUT_32(i + 32)
#define OUT_128(i) OUT_64(i), OUT_64(i + 64)

// d[64 x N] (+)= a[64 x 16] b[16 x N], f32 sums; without `add` from zero. Asynchronous: committed, then waited for. Operands lie
// in shared memory as `tile_desc` says, or a in registers. An operand is K-major where a row of 128 bytes holds neighbours along
// the 16, else MN-major. Warp w of the group has rows 16 w ..; with g = lane / 4, t = lane % 4, d[4 j + i] is
// (16 w + g + 8 (i / 2), 8 j + 2 t + i % 2), and a[4] as of `mma` in ptx.cuh.
template <class T, u32 N, bool A_MN, bool B_MN>
struct Product;

#define MSTAR_PRODUCT(T, TYPE, N, COUNT, I0, I1, I2, I3, I4, I5, I6) \
    template <bool A_MN, bool B_MN> \
    struct Product<T, N, A_MN, B_MN> { \
        static DEVICE void shared(float (&d)[COUNT], u64 a, u64 b, u32 add) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2 ", 0;\n" \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" SUMS_##COUNT "}, %" #I0 ", %" #I1 \
                         ", p, 1, 1, %" #I3 ", %" #I4 ";\n}" \
                         : OUT_##COUNT(0) \
                         : "l"(a), "l"(b), "r"(add), "n"(int(A_MN)), "n"(int(B_MN))); \
        } \
        static DEVICE void registers(float (&d)[COUNT], const u32 (&a)[4], u64 b, u32 add) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5 ", 0;\n" \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" SUMS_##COUNT "}, {%" #I0 ", %" #I1 \
                         ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, %" #I6 ";\n}" \
                         : OUT_##COUNT(0) \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(int(B_MN))); \
        } \
    };
MSTAR_PRODUCT(Bf16, "bf16", 8, 4, 4, 5, 6, 7, 8, 9, 10)
MSTAR_PRODUCT(F16, "f16", 8, 4, 4, 5, 6, 7, 8, 9, 10)
MSTAR_PRODUCT(Bf16, "bf16", 16, 8, 8, 9, 10, 11, 12, 13, 14)
MSTAR_PRODUCT(F16, "f16", 16, 8, 8, 9, 10, 11, 12, 13, 14)
MSTAR_PRODUCT(Bf16, "bf16", 32, 16, 16, 17, 18, 19, 20, 21, 22)
MSTAR_PRODUCT(F16, "f16", 32, 16, 16, 17, 18, 19, 20, 21, 22)
MSTAR_PRODUCT(Bf16, "bf16", 64, 32, 32, 33, 34, 35, 36, 37, 38)
MSTAR_PRODUCT(F16, "f16", 64, 32, 32, 33, 34, 35, 36, 37, 38)
MSTAR_PRODUCT(Bf16, "bf16", 80, 40, 40, 41, 42, 43, 44, 45, 46)
MSTAR_PRODUCT(F16, "f16", 80, 40, 40, 41, 42, 43, 44, 45, 46)
MSTAR_PRODUCT(Bf16, "bf16", 96, 48, 48, 49, 50, 51, 52, 53, 54)
MSTAR_PRODUCT(F16, "f16", 96, 48, 48, 49, 50, 51, 52, 53, 54)
MSTAR_PRODUCT(Bf16, "bf16", 128, 64, 64, 65, 66, 67, 68, 69, 70)
MSTAR_PRODUCT(F16, "f16", 128, 64, 64, 65, 66, 67, 68, 69, 70)
MSTAR_PRODUCT(Bf16, "bf16", 256, 128, 128, 129, 130, 131, 132, 133, 134)
MSTAR_PRODUCT(F16, "f16", 256, 128, 128, 129, 130, 131, 132, 133, 134)
#undef MSTAR_PRODUCT

template <class T, u32 N, bool A_MN, bool B_MN>
DEVICE void wgmma_ss(float (&d)[N / 2], u64 a, u64 b, bool add) {
    Product<T, N, A_MN, B_MN>::shared(d, a, b, add);
}
template <class T, u32 N, bool B_MN>
DEVICE void wgmma_rs(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool add) {
    Product<T, N, false, B_MN>::registers(d, a, b, add);
}

// The descriptor of what lies so many bytes behind (`tile_desc`). Addresses never carry out of the lower word, and the upper one is left
// alone: a product's operand is one addition that waits for no other.
DEVICE u64 desc_behind(u64 desc, u32 bytes) {
    u64 r;
    asm("{\n.reg .b32 lo, hi;\nmov.b64 {lo, hi}, %1;\nadd.u32 lo, lo, %2;\nmov.b64 %0, {lo, hi};\n}" : "=l"(r) : "l"(desc), "r"(bytes >> 4));
    return r;
}

// ---- fragments ----
// ldmatrix_x4 the other way round: lane l names row l % 8 of matrix l / 8 (16 bytes, aligned), register i is of matrix i.
DEVICE void stmatrix_x4(void* row, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
DEVICE void stmatrix_x4_trans(void* row, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
// Two e4m3, the first in the lower byte, as two f16: exact.
DEVICE u32 halves_of_e4m3(u16 two) {
    u32 r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(two));
    return r;
}
#endif

// Where an operand lies: `at` in shared memory, in rows of 128 bytes whose 16-byte pieces are permuted (piece c of row r lies at
// c ^ r % 8, `at` a multiple of 1024 bytes but for steps along the 16).
//   K-major: 8 rows of 64 elements follow each other, `stride` bytes from those 8 to the next; the next 16 are 32 bytes on.
//   MN-major: 8 rows (along the 16) of 64 elements, `stride` bytes to the next 8 rows, `leading` bytes to the next 64 elements; the
//   next 16 are 2 `stride` on.
DEVICE u64 tile_desc(const void* at, u32 leading, u32 stride) {
    return u64(shared_address(at) >> 4 & 0x3fff) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | 1ull << 62;
}
// The same operand `bytes` further on.
DEVICE u64 desc_on(u64 desc, u32 bytes) { return desc + (bytes >> 4); }
