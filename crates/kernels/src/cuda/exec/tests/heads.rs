//! The tensor-core kernels against the CPU, over every option of a layer and over pages that hold NaN where nobody looks.

use half::{bf16, f16};

use super::{DEVICE, stream, take};
use crate::paged::{AttendParams, Geometry, Mask, MaskEntries, PageTable, Variant, attend};
use crate::plan::{Heads, Plan, PlanOptions};
use crate::{Buffer, Device, Element, Stream, TensorRef};

const G: usize = 2;

/// An element of two bytes.
trait Half: Element + Default {
    fn of(value: f32) -> Self;
    fn to(self) -> f32;
}
impl Half for bf16 {
    fn of(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn to(self) -> f32 {
        self.to_f32()
    }
}
impl Half for f16 {
    fn of(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn to(self) -> f32 {
        self.to_f32()
    }
}

struct Case {
    group: usize,
    /// Widths of keys and of values.
    widths: (usize, usize),
    page: usize,
    /// `(q_len, kv_len)`.
    rows: &'static [(usize, usize)],
    variant: Variant,
    masked: bool,
}

fn number(index: usize, salt: usize) -> f32 {
    let hash = (index.wrapping_mul(0x9e37_79b1) ^ salt.wrapping_mul(0x85eb_ca6b)) as u32;
    (hash.wrapping_mul(0x27d4_eb2f) >> 8) as f32 / (1 << 23) as f32 - 1.0
}

/// Key `key` is hidden from every query of its row, whatever the mask says of others.
fn hidden(key: usize) -> bool {
    key % 37 == 5
}

/// The mask leaves key `key` to the queries before it alone, from which a causal layer hides it.
fn only_before(key: usize) -> bool {
    key % 37 == 9
}

fn check<E: Half>(stream: &Stream, case: &Case, tolerance: f32) {
    let Case { group, widths: (d, dv), page, rows, variant, masked } = case;
    let (group, d, dv, page) = (*group, *d, *dv, *page);
    let (mut qo, mut indptr, mut last, mut begin) = (vec![0i32], vec![0i32], vec![], vec![0i64]);
    let (mut visible, mut pages) = (vec![], 0);
    for &(q, kv) in rows.iter() {
        qo.push(qo[qo.len() - 1] + q as i32);
        pages += kv.div_ceil(page);
        indptr.push(pages as i32);
        last.push(if kv == 0 { 0 } else { ((kv - 1) % page + 1) as i32 });
        for query in 0..q {
            let mut seen: Vec<u8> = (0..kv).map(|key| u8::from((key * 7 + query) % 5 != 0)).collect();
            (0..kv).filter(|&key| hidden(key)).for_each(|key| seen[key] = 0);
            (0..kv)
                .filter(|&key| only_before(key))
                .for_each(|key| seen[key] = u8::from(kv + query < key + q));
            visible.extend(seen);
        }
        begin.push(visible.len() as i64);
    }
    // Every other page of the pool belongs to nobody.
    let pool = 2 * pages + 1;
    let indices: Vec<i32> = (0..pages).map(|at| (2 * (at * 7919 % pages.max(1)) + 1) as i32).collect();
    assert!(pages == 0 || !pages.is_multiple_of(7919), "each page is named once");
    let table = PageTable {
        qo_indptr: &qo,
        kv_indptr: &indptr,
        kv_indices: &indices,
        kv_last_page_len: &last,
        mask: masked.then_some(Mask { entries: MaskEntries::Bytes(&visible), indptr: &begin }),
        num_pages: pool,
        ..PageTable::default()
    };
    let fill = |width: usize, salt: usize| -> Vec<E> {
        let mut all = vec![E::of(f32::NAN); pool * page * G * width];
        for (row, &(_, kv)) in rows.iter().enumerate() {
            let nobody = |key: usize| hidden(key) || variant.causal && only_before(key);
            for key in (0..kv).filter(|&key| !(*masked && nobody(key))) {
                let slot = indices[indptr[row] as usize + key / page] as usize * page + key % page;
                for at in slot * G * width..(slot + 1) * G * width {
                    all[at] = E::of(number(at, salt));
                }
            }
        }
        all
    };
    let (heads, tokens) = (G * group, qo[qo.len() - 1] as usize);
    let q: Vec<E> = (0..tokens * heads * d).map(|i| E::of(2.0 * number(i, 3))).collect();
    let (k, v) = (fill(d, 1), fill(dv, 2));
    let per_head =
        |salt: usize, scale: f32| -> Vec<f32> { (0..heads).map(|h| number(h, salt) * scale).collect() };
    let (sinks, slopes) = (per_head(4, 2.0), per_head(5, 0.02));
    let geometry = Geometry {
        num_qo_heads: heads,
        num_kv_heads: G,
        head_dim_qk: d,
        head_dim_vo: dv,
        page_size: page,
        q_dtype: E::DTYPE,
        kv_dtype: E::DTYPE,
    };
    let run = |device: Device, stream: &Stream| -> (Vec<E>, Vec<f32>) {
        let options = PlanOptions { device, ..PlanOptions::default() };
        let mut plan = Plan::<Heads>::new(&geometry, variant, &table, &options).unwrap();
        plan.stage(stream).unwrap();
        let on = |data: &[E], shape: &[usize]| {
            let mut buffer = Buffer::for_tensor_on(device, E::DTYPE, shape).unwrap();
            let to = buffer.tensor_mut(0, E::DTYPE, shape).unwrap();
            crate::copy(stream, TensorRef::from_slice(data, shape).unwrap(), to).unwrap();
            buffer
        };
        let numbers = |data: &[f32]| {
            let mut buffer = Buffer::for_tensor_on(device, f32::DTYPE, &[heads]).unwrap();
            let to = buffer.tensor_mut(0, f32::DTYPE, &[heads]).unwrap();
            crate::copy(stream, TensorRef::from_slice(data, &[heads]).unwrap(), to).unwrap();
            buffer
        };
        let (q_shape, o_shape) = ([tokens, heads, d], [tokens, heads, dv]);
        let (k_shape, v_shape) = ([pool, page, G, d], [pool, page, G, dv]);
        let (q, k, v) = (on(&q, &q_shape), on(&k, &k_shape), on(&v, &v_shape));
        let (sinks, slopes) = (numbers(&sinks), numbers(&slopes));
        let mut o = on(&vec![E::of(f32::NAN); tokens * heads * dv], &o_shape);
        let mut lse = Buffer::for_tensor_on(device, f32::DTYPE, &o_shape[..2]).unwrap();
        let bytes = plan.workspace_bytes() + 64;
        let mut workspace = Buffer::zeroed_on(device, bytes).unwrap();
        let params = AttendParams {
            work: plan.work(),
            q: q.tensor(0, E::DTYPE, &q_shape).unwrap(),
            k: k.tensor(0, E::DTYPE, &k_shape).unwrap(),
            v: v.tensor(0, E::DTYPE, &v_shape).unwrap(),
            kv_scales: None,
            sinks: variant.sinks.then(|| sinks.tensor(0, f32::DTYPE, &[heads]).unwrap()),
            alibi_slopes: variant.alibi.then(|| slopes.tensor(0, f32::DTYPE, &[heads]).unwrap()),
            o: o.tensor_mut(0, E::DTYPE, &o_shape).unwrap(),
            lse: Some(lse.tensor_mut(0, f32::DTYPE, &o_shape[..2]).unwrap()),
            workspace: workspace.tensor_mut(0, crate::DType::U8, &[bytes]).unwrap(),
            workers: 1,
        };
        attend(stream, params).unwrap();
        (take::<E>(stream, &o, tokens * heads * dv), take::<f32>(stream, &lse, tokens * heads))
    };
    let (want, want_lse) = run(Device::Cpu, &Stream::cpu());
    let (got, got_lse) = run(DEVICE, stream);
    for (i, (got, want)) in got_lse.iter().zip(&want_lse).enumerate() {
        let near = got == want || (got - want).abs() < 1e-3 * (1.0 + want.abs());
        assert!(near, "lse of ({}, {}): {got}, not {want}", i / heads, i % heads);
    }
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let (got, want) = (got.to(), want.to());
        let near = (got - want).abs() < tolerance * (1.0 + want.abs());
        assert!(near, "o of ({}, {}): {got}, not {want}", i / (heads * dv), i % (heads * dv) / dv);
    }
}

#[test]
fn heads_agree_with_the_cpu_and_nan_where_nobody_looks_stays_out() {
    let Some(owned) = stream() else { return };
    let stream = owned.stream();
    let plain = Variant::causal(40);
    // Rows of both kernels; several leaves; a row without keys; more queries than keys; widths of half chunks.
    let rows = &[(1, 1100), (40, 130), (2, 0), (3, 2), (150, 600)];
    let case = Case { group: 4, widths: (40, 24), page: 7, rows, variant: plain, masked: true };
    check::<bf16>(&stream, &case, 2e-2);
    let all = Variant {
        window_left: Some(90),
        logits_soft_cap: Some(2.0),
        alibi: true,
        sinks: true,
        sm_scale: -0.3,
        ..plain
    };
    let case = Case { group: 20, widths: (64, 64), page: 16, rows, variant: all, masked: false };
    check::<f16>(&stream, &case, 3e-3);
    // A width that no 16 bytes divide, read element by element; every query sees every key.
    let full = Variant { sm_scale: -0.2, ..Variant::full(35) };
    let case = Case { group: 1, widths: (35, 50), page: 1, rows, variant: full, masked: true };
    check::<bf16>(&stream, &case, 2e-2);
    // Pages of which boxes have some slots, on a Hopper: windows, masks, a scale that turns scores around, groups that fill no tile.
    let windowed = Variant { window_left: Some(90), sinks: true, ..Variant::causal(128) };
    let case = Case { group: 4, widths: (128, 128), page: 16, rows, variant: windowed, masked: false };
    check::<bf16>(&stream, &case, 2e-2);
    let turned = Variant { sm_scale: -0.1, ..Variant::full(64) };
    let case = Case { group: 1, widths: (64, 64), page: 64, rows, variant: turned, masked: true };
    check::<f16>(&stream, &case, 3e-3);
    let case =
        Case { group: 3, widths: (120, 104), page: 48, rows, variant: Variant::causal(120), masked: true };
    check::<bf16>(&stream, &case, 2e-2);
    let case =
        Case { group: 2, widths: (200, 256), page: 32, rows, variant: Variant::full(200), masked: false };
    check::<bf16>(&stream, &case, 2e-2);
    // The same where a cap and slopes change scores, both or one.
    let changed = Variant { logits_soft_cap: Some(2.0), sm_scale: -0.1, ..windowed };
    let case = Case { group: 4, widths: (128, 128), page: 16, rows, variant: changed, masked: true };
    check::<bf16>(&stream, &case, 2e-2);
    let sloped = Variant { alibi: true, ..Variant::full(200) };
    let case = Case { group: 3, widths: (200, 256), page: 32, rows, variant: sloped, masked: false };
    check::<bf16>(&stream, &case, 2e-2);
    let both = Variant { alibi: true, ..changed };
    let case = Case { group: 1, widths: (120, 104), page: 48, rows, variant: both, masked: false };
    check::<f16>(&stream, &case, 3e-3);
}
