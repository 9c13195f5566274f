// hopper.cuh's names for a host compiler. Stricter than a device: a product reads its operands and writes its sums when it is
// waited for and not before; copies that a mark stands for land when nothing else can go on.
#pragma once

namespace emulated {

// What is in a Mark: arrivals in a phase, those that are missing, and the phase.
struct Phase {
    u16 count, missing;
    u32 phase;  // MARKED + 0, 1, 2 ..
};
static_assert(sizeof(Phase) == 8, "as Mark");
constexpr u32 MARKED = 0x4d000000;

static inline Phase* phase_of(Mark* mark) {
    Phase* phase = reinterpret_cast<Phase*>(mark);
    if (phase->phase >> 24 != MARKED >> 24) fail("a mark that was not made");
    return phase;
}
// Whether all of a phase has come: arrivals, and the bytes that were promised.
static inline void settle(Block& block, Phase* phase) {
    const i64 owed = block.owed[phase];
    if (phase->missing || owed > 0) return;
    if (owed < 0) fail("bytes came to a mark that nobody expects there");
    phase->missing = phase->count;
    phase->phase++;
}
static inline void arrive(Block& block, void* mark) {
    Phase* phase = phase_of(static_cast<Mark*>(mark));
    if (phase->missing == 0) fail("an arrival too many: a mark waits for bytes alone");
    phase->missing--;
    settle(block, phase);
}
// What a peer did at a mark: its block is to wait until the phase of now has passed, or behind the cluster's barrier.
static inline void note(const Late& late) {
    if (late.barrier == 0) return;
    Phase* phase = phase_of(static_cast<Mark*>(late.mark));
    Block::Sent& sent = late.to->sent[phase];
    sent = Block::Sent{phase->phase, sent.phase == phase->phase && sent.barrier > late.barrier ? sent.barrier : late.barrier};
    if (late.handing) late.to->handed[phase] = true;
}
static inline void arrived(const Late& late) {
    note(late);
    arrive(*late.to, late.mark);
}
static inline void landed(const Late& late) {
    note(late);
    Phase* phase = phase_of(static_cast<Mark*>(late.mark));
    late.to->owed[phase] -= late.bytes;
    settle(*late.to, phase);
}
// A thread of the block knows that a phase has passed.
static inline void passed(Phase* phase) {
    auto& sent = now->block->sent;
    const auto at = sent.find(phase);
    if (at != sent.end() && phase->phase > at->second.phase) sent.erase(at);
}

// A map, as api/emulated/map.rs encodes it.
struct Map {
    u32 marked;
    u8 size, axes, swizzled, rest;
    u64 at, extent[5], stride[4];
    u32 boxed[6];
    u64 more[2];
};
static_assert(sizeof(Map) == sizeof(TensorMap), "as encoded");

// The box of a map whose corner is `corner`, innermost first, on its way from here on: to a block of the cluster, at `to` and `mark` as this
// one has them.
static inline void box(Block& block, void* to, const TensorMap& encoded, const i32* corner, u32 axes, Mark* mark) {
    Map map;
    std::memcpy(&map, &encoded, sizeof map);
    if (map.marked != 0x4d617073) fail("a tensor map that was not encoded");
    if (reinterpret_cast<size_t>(&encoded) % 64) fail("a tensor map lies on 64 bytes");
    if (map.axes != axes) fail("a box of another number of axes than its map");
    const u32 row = map.boxed[0] * map.size, offset = u32(static_cast<u8*>(to) - now->block->shared);
    if (offset % (map.swizzled ? 1024 : 128)) fail("a box lands on 128 bytes, on 1024 where its pieces are permuted");
    if (corner[0] * i32(map.size) % 16) fail("a box starts at a multiple of 16 bytes along its row");
    u32 rows = 1;
    for (u32 a = 1; a < axes; a++) rows *= map.boxed[a];
    if (offset + row * rows > now->block->shared_bytes) fail("a box lands beyond shared memory");
    std::vector<Copy> copies;
    for (u32 r = 0; r < rows; r++) {
        u64 at = map.at;
        bool inside = true;
        for (u32 a = 1, left = r; a < axes; left /= map.boxed[a], a++) {
            const i64 along = i64(corner[a]) + left % map.boxed[a];
            inside = inside && along >= 0 && along < i64(map.extent[a]);
            at += u64(along) * map.stride[a - 1];
        }
        for (u32 byte = 0, step; byte < row; byte += step) {
            const i64 x = i64(corner[0]) + byte / map.size, end = i64(map.extent[0]);
            // A piece at once where all of it is there, or nothing.
            const bool first = inside && x >= 0 && x < end, last = inside && x + 16 / map.size - 1 >= 0 && x + 16 / map.size <= end;
            step = byte % 16 == 0 && first == last ? 16 : map.size;
            u32 place = r * row + byte;
            if (map.swizzled) place = r * 128 + ((byte / 16) ^ (offset / 128 + r) % 8) * 16 + byte % 16;
            u8* lane = block.shared + offset + place;
            std::memset(lane, 0xff, step);
            copies.push_back({lane, first ? reinterpret_cast<const void*>(at + u64(x) * map.size) : nullptr, step});
        }
    }
    u8* at = block.shared + (reinterpret_cast<u8*>(mark) - now->block->shared);
    now->block->cluster->late.push_back({std::move(copies), at, &landed, row * rows, &block, nullptr, &block == now->block ? 0 : NONE});
}

template <class T>
static double half_of(u16 bits) {
    return to_float(T{bits});
}

// Element (i, k) of an operand, i along M or N.
static inline u16 element_of(u64 desc, bool mn, u32 i, u32 k) {
    u32 leading = u32(desc >> 16 & 0x3fff) << 4, stride = u32(desc >> 32 & 0x3fff) << 4, at = u32(desc & 0x3fff) << 4;
    at += mn ? i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2 : i / 8 * stride + i % 8 * 128 + k * 2;
    at ^= (at >> 7 & 7) << 4;
    if (at + 2 > now->block->shared_bytes) fail("a product reads beyond shared memory");
    u16 bits;
    std::memcpy(&bits, now->block->shared + at, 2);
    return bits;
}

static inline void multiply(const Pending& one) {
    u32 lane = now->id % 32, warp = now->id / 32 % 4, g = lane / 4, t = lane % 4;
    double a[2][16];
    for (u32 r = 0; r < 2; r++) {
        for (u32 k = 0; k < 16; k++) {
            if (!one.registers) {
                a[r][k] = one.half(element_of(one.a, one.a_mn, 16 * warp + g + 8 * r, k));
            }
        }
    }
    if (one.registers) {
        auto all = exchange(PRODUCT, one.words, 4);
        for (u32 r = 0; r < 2; r++) {
            for (u32 k = 0; k < 16; k++) {
                a[r][k] = one.half(u16(all[4 * g + k % 8 / 2][r + 2 * (k / 8)] >> 16 * (k % 2)));
            }
        }
    }
    for (u32 j = 0; j < one.n / 8; j++) {
        for (u32 c = 0; c < 2; c++) {
            double sum[2] = {0, 0};
            for (u32 k = 0; k < 16; k++) {
                double b = one.half(element_of(one.b, one.b_mn, 8 * j + 2 * t + c, k));
                sum[0] += a[0][k] * b, sum[1] += a[1][k] * b;
            }
            for (u32 r = 0; r < 2; r++) {
                float& d = one.d[4 * j + 2 * r + c];
                d = float((one.add ? d : 0.0) + sum[r]);
            }
        }
    }
}

template <class T>
static inline void product(float* d, u32 n, const u32* words, u64 a, u64 b, bool a_mn, bool b_mn, bool add) {
    Pending one{d, n, {0, 0, 0, 0}, a, b, words != nullptr, a_mn, b_mn, add, &half_of<T>};
    if (words) std::memcpy(one.words, words, sizeof one.words);
    now->products.back().push_back(one);
}

static inline void stmatrix(void* row, const u32 (&r)[4], bool transposed) {
    if (reinterpret_cast<size_t>(row) % 16) fail("stmatrix of a row that is not 16-byte aligned");
    u64 at = reinterpret_cast<u64>(row);
    u32 words[6] = {u32(at), u32(at >> 32), r[0], r[1], r[2], r[3]};
    auto all = exchange(STMATRIX, words, 6);
    u32 lane = now->id % 32;
    for (u32 i = 0; i < 4; i++) {
        for (u32 c = 0; c < 2; c++) {
            u32 y = lane / 4, x = 2 * (lane % 4) + c;
            u32 to = transposed ? x : y, column = transposed ? y : x;
            const u32* of = all[8 * i + to];
            reinterpret_cast<u16*>(u64(of[0]) | u64(of[1]) << 32)[column] = u16(r[i] >> 16 * c);
        }
    }
    exchange(STMATRIX, words, 0);
}

// A block has what it was launched with and no more: what a warp takes, others gave before. By all lanes of a warp; its first counts.
static inline void take_registers(u32 n) {
    Block& block = *now->block;
    if (now->id % 32 != 0) return;
    u32& mine = block.registers[now->id / 32];
    if (n < mine) fail("registers_more of fewer than there are");
    while (block.free < n - mine) wait_until_changed(&block.given, block.given);
    block.free -= n - mine;
    mine = n;
}
static inline void give_registers(u32 n) {
    Block& block = *now->block;
    if (now->id % 32 != 0) return;
    u32& mine = block.registers[now->id / 32];
    if (n > mine) fail("registers_fewer of more than there are");
    block.free += mine - n;
    block.given++;
    mine = n;
}

}  // namespace emulated

DEVICE void mark_init(Mark* mark, u32 count) {
    emulated::Phase phase{u16(count), u16(count), emulated::MARKED};
    std::memcpy(mark, &phase, sizeof phase);
    emulated::now->block->handed.erase(mark);
}
DEVICE void marks_ready() {}
DEVICE void mark_arrive(Mark* mark) { emulated::arrive(*emulated::now->block, mark); }
DEVICE void mark_arrive_expecting(Mark* mark, u32 bytes) {
    emulated::phase_of(mark);
    emulated::now->block->owed[mark] += bytes;
    emulated::arrive(*emulated::now->block, mark);
}
DEVICE void box_2d(void* to, const TensorMap& map, i32 x, i32 y, Mark* mark) {
    const i32 corner[2] = {x, y};
    emulated::box(*emulated::now->block, to, map, corner, 2, mark);
}
DEVICE void box_3d(void* to, const TensorMap& map, i32 x, i32 y, i32 z, Mark* mark) {
    const i32 corner[3] = {x, y, z};
    emulated::box(*emulated::now->block, to, map, corner, 3, mark);
}
DEVICE void box_4d(void* to, const TensorMap& map, i32 x, i32 y, i32 z, i32 w, Mark* mark) {
    const i32 corner[4] = {x, y, z, w};
    emulated::box(*emulated::now->block, to, map, corner, 4, mark);
}
DEVICE void prefetch_map(const TensorMap&) {}
DEVICE bool elected() {
    emulated::exchange(emulated::ELECT, nullptr, 0);
    return thread_x() % 32 == 0;
}
DEVICE void mark_arrive_after_copies(Mark* mark) {
    emulated::phase_of(mark);
    emulated::Fiber* self = emulated::now;
    std::vector<emulated::Copy> copies;
    auto stand_for = [&](std::vector<emulated::Copy>& some) {
        some.erase(std::remove_if(some.begin(), some.end(), [](auto& copy) { return copy.landed && *copy.landed; }), some.end());
        for (emulated::Copy& copy : some) {
            if (!copy.landed) copy.landed = std::make_shared<bool>(false);
            copies.push_back(copy);
        }
    };
    for (auto& group : self->groups) stand_for(group);
    stand_for(self->open);
    self->block->cluster->late.push_back({std::move(copies), mark, &emulated::arrived, 0, self->block});
}
namespace emulated {
static inline bool has_passed(Mark* mark, u32 parity, bool handed) {
    Phase* phase = phase_of(mark);
    if ((phase->phase & 1) == parity) return false;
    if (!handed && now->block->handed.count(phase)) fail("a plain wait where peers hand over what they stored: mark_wait_handed");
    passed(phase);
    return true;
}
static inline void wait(Mark* mark, u32 parity, bool handed) {
    Phase* phase = phase_of(mark);
    while (!has_passed(mark, parity, handed)) wait_until_changed(&phase->phase, phase->phase);
}
}  // namespace emulated
DEVICE void mark_wait(Mark* mark, u32 parity) { emulated::wait(mark, parity, false); }
DEVICE bool mark_passed(Mark* mark, u32 parity) { return emulated::has_passed(mark, parity, false); }
DEVICE void named_arrive(u32 id, u32 count) { emulated::barrier_arrive(id, count); }

DEVICE u32 group_index() { return thread_x() / 128; }
template <u32 N>
DEVICE void registers_more() {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "registers come in eights");
    emulated::take_registers(N);
}
template <u32 N>
DEVICE void registers_fewer() {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "registers come in eights");
    emulated::give_registers(N);
}
DEVICE void async_fence() {}
DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() { emulated::now->products.emplace_back(); }
template <u32 N>
DEVICE void wgmma_wait() {
    auto& batches = emulated::now->products;
    // The last one is open.
    while (batches.size() > N + 1) {
        for (const emulated::Pending& one : batches.front()) emulated::multiply(one);
        batches.erase(batches.begin());
    }
}
template <u32 N>
DEVICE void pin(float (&)[N]) {}
DEVICE void pin(u64&) {}
template <class T, u32 N, bool A_MN, bool B_MN>
DEVICE void wgmma_ss(float (&d)[N / 2], u64 a, u64 b, bool add) {
    emulated::product<T>(d, N, nullptr, a, b, A_MN, B_MN, add);
}
template <class T, u32 N, bool B_MN>
DEVICE void wgmma_rs(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool add) {
    emulated::product<T>(d, N, a, 0, b, false, B_MN, add);
}
DEVICE u64 desc_behind(u64 desc, u32 bytes) { return (desc & ~0xffffffffull) | (u32(desc) + (bytes >> 4)); }
DEVICE void stmatrix_x4(void* row, const u32 (&r)[4]) { emulated::stmatrix(row, r, false); }
DEVICE void stmatrix_x4_trans(void* row, const u32 (&r)[4]) { emulated::stmatrix(row, r, true); }
DEVICE u32 shared_address(const void* at) {
    return u32(static_cast<const u8*>(at) - emulated::now->block->shared);
}
DEVICE u32 halves_of_e4m3(u16 two) {
    auto half = [](u8 v) -> u32 {
        u32 sign = u32(v & 0x80) << 8, exponent = v >> 3 & 15, mantissa = v & 7;
        if (exponent == 15 && mantissa == 7) return sign | 0x7fff;
        if (exponent > 0) return sign | (exponent + 8) << 10 | mantissa << 7;
        return sign | from_float<F16>(float(mantissa) * 0.001953125f).bits;
    };
    return half(u8(two)) | half(u8(two >> 8)) << 16;
}
