//! Hopper's words (`cu/hopper.cuh`) one by one: products from every kind of operand, marks, fragments.

use bytemuck::{Pod, Zeroable};

use super::*;
use crate::cuda::jit::{self, Key, Unit};

/// d[64 x N] = a[64 x 64] b[64 x N] for one kind of operands: both are put where `tile_desc` says that they lie, by copies that a mark
/// stands for, and by plain stores.
const UNIT: Unit = Unit::of(
    "products.cu",
    r#"
#include "hopper.cuh"
struct Params { u64 a, b, d; };
#if HALF == 1
typedef Bf16 T;
#else
typedef F16 T;
#endif
constexpr u32 K = 64;
// Puts 16-byte piece `piece` of row `row` of an operand of `rows` rows of `pieces` pieces.
DEVICE u32 place(u32 row, u32 piece, u32 rows) { return piece / 8 * rows * 128 + row * 128 + ((piece % 8) ^ (row % 8)) * 16; }
DEVICE void bring(u8* to, u64 from, u32 rows, u32 pieces) {
    for (u32 i = thread_x(); i < rows * pieces; i += 128) {
        u8* at = to + place(i / pieces, i % pieces, rows);
        if (i % 3 == 0) store16(at, load16(reinterpret_cast<const u8*>(from) + 16 * i));
        else cp_async_16(at, reinterpret_cast<const u8*>(from) + 16 * i, true);
    }
}
MSTAR_KERNEL(products, Params, 128, 1) {
    SHARED(memory);
    u8 *a = memory, *b = memory + 8192;
    Mark* mark = reinterpret_cast<Mark*>(memory + 8192 + 128 * K * (COLUMNS > 64 ? COLUMNS / 64 : 1));
    if (thread_x() == 0) {
        mark_init(mark, 128);
        mark_init(mark + 1, 1);
        marks_ready();
    }
    block_sync();
    bring(a, p.a, 64, 8);  // [m][k], or [k][m]
    if (RIGHT_MN) bring(b, p.b, K, COLUMNS / 8 < 8 ? 8 : COLUMNS / 8);  // [k][n]
    else bring(b, p.b, COLUMNS, 8);                            // [n][k]
    mark_arrive_after_copies(mark);
    mark_wait(mark, 0);
    async_fence();
    block_sync();
    float d[COLUMNS / 2];
    for (u32 i = 0; i < COLUMNS / 2; i++) d[i] = infinity();
    u64 from = tile_desc(a, 8192, 1024), to = tile_desc(b, RIGHT_MN ? 128 * K : 16, 1024);
    wgmma_fence();
    UNROLL
    for (u32 k = 0; k < K / 16; k++) {
        u64 y = desc_on(to, k * (RIGHT_MN ? 2048 : 32));
        if (LEFT == 2) {
            u32 r[4];
            u32 row = 16 * warp() + (lane() & 15), piece = 2 * k + lane() / 16;
            ldmatrix_x4(r, a + place(row, piece, 64));
            wgmma_rs<T, COLUMNS, RIGHT_MN>(d, r, y, k != 0);
        } else {
            wgmma_ss<T, COLUMNS, LEFT == 1, RIGHT_MN>(d, desc_on(from, k * (LEFT == 1 ? 2048 : 32)), y, k != 0);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(d);
    if (thread_x() == 127) mark_arrive(mark + 1);
    mark_wait(mark + 1, 0);
    u32 row = 16 * warp() + lane() / 4, column = 2 * (lane() % 4);
    float* out = reinterpret_cast<float*>(p.d);
    for (u32 i = 0; i < COLUMNS / 2; i++) out[(row + 8 * (i % 4 / 2)) * COLUMNS + column + 8 * (i / 4) + i % 2] = d[i];
}
"#,
);

/// 8 x 8 matrices written and read in either way, and every e4m3 as an f16.
const FRAGMENTS: Unit = Unit::of(
    "fragments.cu",
    r#"
#include "hopper.cuh"
struct Params { u64 a, b, d; };
MSTAR_KERNEL(fragments, Params, 128, 1) {
    SHARED(memory);
    u32 r[4], back[4];
    for (u32 i = 0; i < 4; i++) r[i] = (2 * (4 * thread_x() + i)) | (2 * (4 * thread_x() + i) + 1) << 16;
    u8* mine = memory + 1024 * warp();
    stmatrix_x4(mine + 16 * lane(), r);
    warp_sync();
    ldmatrix_x4(back, mine + 16 * lane());
    u32 wrong = 0;
    for (u32 i = 0; i < 4; i++) wrong += back[i] != r[i];
    warp_sync();
    stmatrix_x4_trans(mine + 512 + 16 * lane(), back);
    warp_sync();
    ldmatrix_x4_trans(back, mine + 512 + 16 * lane());
    for (u32 i = 0; i < 4; i++) wrong += back[i] != r[i];
    ldmatrix_x4(back, mine + 512 + 16 * lane());
    for (u32 i = 0; i < 4; i++) wrong += back[i] == r[i];
    named_arrive(2, 256);
    named_sync(2, 256);
    u32* out = reinterpret_cast<u32*>(p.d);
    out[thread_x()] = wrong;
    out[128 + thread_x()] = halves_of_e4m3(u16(2 * thread_x() | (2 * thread_x() + 1) << 8));
}
"#,
);

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    a: u64,
    b: u64,
    d: u64,
}

pub(super) fn is_hopper(test: &str) -> bool {
    let hopper = context().is_some_and(|context| context.arch().0 == 9);
    if !hopper {
        println!("SKIPPED {test}: there is no Hopper");
    }
    hopper
}

/// Runs a block of 128 threads on two operands, and returns `words` words.
fn run(key: &Key, a: &[u8], b: &[u8], words: usize) -> Vec<u32> {
    let owned = OwnedStream::new(DEVICE).unwrap();
    let stream = owned.stream();
    let on_device = |bytes: &[u8]| {
        let mut buffer = Buffer::zeroed_on(DEVICE, bytes.len().max(16)).unwrap();
        let to = buffer.tensor_mut(0, DType::U8, &[bytes.len()]).unwrap();
        if !bytes.is_empty() {
            copy(&stream, crate::TensorRef::from_slice(bytes, &[bytes.len()]).unwrap(), to).unwrap();
        }
        buffer
    };
    let (a, b) = (on_device(a), on_device(b));
    let d = Buffer::zeroed_on(DEVICE, 4 * words).unwrap();
    let at = |buffer: &Buffer| buffer.as_ptr() as u64;
    let params = Params { a: at(&a), b: at(&b), d: at(&d) };
    let function = jit::function(DEVICE, key).unwrap();
    let how = Launch { grid: [1, 1, 1], block: 128, shared: 48 << 10 };
    // SAFETY: the kernel's one parameter, whose addresses are of buffers that live until the copy below has waited.
    unsafe { launch(&function, &stream, how, &params) }.unwrap();
    let mut out = vec![0u32; words];
    let from = d.tensor(0, DType::I32, &[words]).unwrap();
    let bytes: &mut [i32] = bytemuck::cast_slice_mut(&mut out);
    copy(&stream, from, crate::TensorMut::from_slice(bytes, &[words]).unwrap()).unwrap();
    out
}

#[test]
fn products_of_every_kind_of_operand_are_those_of_the_host() {
    if !is_hopper("products_of_every_kind_of_operand") {
        return;
    }
    // Small whole numbers, so that sums are exact in any order.
    let a = |m: usize, k: usize| ((m * 7 + k * 3) % 13) as f32 - 6.0;
    let b = |k: usize, n: usize| ((k * 5 + n * 11) % 17) as f32 - 8.0;
    let widths: &[usize] =
        if cfg!(feature = "emulator") { &[16, 64, 256] } else { &[8, 16, 32, 64, 128, 256] };
    let all = widths.iter().map(|&n| (DType::Bf16, n)).chain([(DType::F16, 64)]);
    let kinds = (0..3).flat_map(|kind| [(kind, false), (kind, true)]);
    let all: Vec<_> =
        all.flat_map(|(half, n)| kinds.clone().map(move |(kind, b_mn)| (half, n, kind, b_mn))).collect();
    let key = |&(half, n, kind, b_mn): &(DType, usize, i64, bool)| {
        let half = if half == DType::Bf16 { 1 } else { 2 };
        Key::new(UNIT, "products")
            .with("HALF", half)
            .with("COLUMNS", n as i64)
            .with("LEFT", kind)
            .with("RIGHT_MN", b_mn.into())
    };
    jit::prepare(DEVICE, &all.iter().map(key).collect::<Vec<_>>()).unwrap();
    for case in &all {
        let &(half, n, kind, b_mn) = case;
        let bits = |value: f32| match half {
            DType::Bf16 => half::bf16::from_f32(value).to_bits(),
            _ => half::f16::from_f32(value).to_bits(),
        };
        let matrix = |rows: usize, columns: usize, of: &dyn Fn(usize, usize) -> f32| -> Vec<u8> {
            (0..rows * columns).flat_map(|i| bits(of(i / columns, i % columns)).to_ne_bytes()).collect()
        };
        let left = matrix(64, 64, &|r, c| if kind == 1 { a(c, r) } else { a(r, c) });
        let right = if b_mn { matrix(64, n.max(64), &b) } else { matrix(n, 64, &|r, c| b(c, r)) };
        for (at, bits) in run(&key(case), &left, &right, 64 * n).into_iter().enumerate() {
            let (m, n) = (at / n, at % n);
            let expected: f32 = (0..64).map(|k| a(m, k) * b(k, n)).sum();
            assert_eq!(f32::from_bits(bits), expected, "{}: ({m}, {n})", key(case));
        }
    }
}

#[test]
fn fragments_come_back_and_bytes_become_halves() {
    if !is_hopper("fragments_come_back") {
        return;
    }
    let out = run(&Key::new(FRAGMENTS, "fragments"), &[], &[], 256);
    assert_eq!(out[..128], [0; 128]);
    let value_of = |byte: u8| -> f32 {
        let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
        let size = match (exponent, byte & 7) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa * 2f32.powi(-9),
            _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
        };
        if byte & 0x80 == 0 { size } else { -size }
    };
    for byte in 0..=255u8 {
        let word = out[128 + usize::from(byte) / 2] >> (16 * u32::from(byte % 2));
        let got = half::f16::from_bits(word as u16).to_f32();
        let expected = value_of(byte);
        assert!(got == expected || got.is_nan() && expected.is_nan(), "{byte:#x}: {got}, not {expected}");
    }
}

/// Three groups of a block of 384, which is launched with 168 registers each.
#[cfg(feature = "emulator")]
const REGISTERS: Unit = Unit::of(
    "registers.cu",
    "#include \"hopper.cuh\"\n\
     struct Params { u64 at; };\n\
     MSTAR_KERNEL(registers, Params, 384, 1) {\n\
         if (group_index() == 2) registers_fewer<FEWER>();\n\
         else registers_more<MORE>();\n\
         block_sync();\n\
         reinterpret_cast<u32*>(p.at)[thread_x()] = thread_x();\n\
     }\n",
);
/// Set in a process that launches what would wait for ever.
#[cfg(feature = "emulator")]
const CHILD: &str = "MSTAR_REGISTERS_CHILD";

/// 96 + 208 + 208 are more than three times 168: a card waits for ever, and the emulated device says so.
#[test]
#[cfg(feature = "emulator")]
fn groups_that_take_more_registers_than_a_block_has_are_refused() {
    if context().is_none() {
        return;
    }
    let owned = OwnedStream::new(DEVICE).unwrap();
    let stream = owned.stream();
    let go = |fewer: i64, more: i64| {
        let key = Key::new(REGISTERS, "registers").with("FEWER", fewer).with("MORE", more);
        let mut out = Buffer::zeroed_on(DEVICE, 384 * 4).unwrap();
        let at = out.tensor_mut(0, DType::U8, &[384 * 4]).unwrap().as_mut_ptr() as u64;
        let how = Launch { grid: [2, 1, 1], block: 384, shared: 0 };
        // SAFETY: the parameter is the kernel's, and points to a word a thread, which lives until the stream has run.
        unsafe { launch(&jit::function(DEVICE, &key).unwrap(), &stream, how, &at) }.unwrap();
        stream.synchronize().unwrap();
    };
    if std::env::var_os(CHILD).is_some() {
        return go(96, 208);
    }
    for (fewer, more) in [(88, 208), (72, 216), (24, 240)] {
        go(fewer, more);
    }
    let test = "cuda::tests::products::groups_that_take_more_registers_than_a_block_has_are_refused";
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads", "1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stderr);
    assert!(!child.status.success() && said.contains("registers that no other gives away"), "{said}");
}
