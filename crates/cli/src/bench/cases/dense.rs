//! Dense attention: fresh keys behind a prefix that is packed, in pages, or not there.

use mstar_kernels::dense::{
    AttendParams, Geometry, Prefix, Table, Variant, attend, schedule, workspace_bytes,
};
use mstar_kernels::paged::{ScheduleOptions, Target};
use mstar_kernels::work::WorkList;
use mstar_kernels::{DType, Kernels};

use super::{Case, Cost, Made, Place};

const PAGE_SIZE: usize = 16;

/// Where three quarters of the keys lie.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stored {
    Fresh,
    Packed,
    Pages,
}

/// The cases of this family: a quarter of the keys are the queries' own.
pub(super) fn list(quick: bool) -> Vec<Case> {
    let keys = if quick { 512 } else { 4096 };
    let dtypes = [DType::F32, DType::Bf16];
    let stored = [Stored::Fresh, Stored::Packed, Stored::Pages];
    let base = Rows {
        rows: 1,
        queries: keys / 4,
        keys,
        stored: Stored::Fresh,
        dtype: DType::F32,
        heads: 8,
        width: 64,
        wide: "",
        causal: false,
    };
    let of = |dtype| stored.map(|stored| case(Rows { stored, dtype, ..base }));
    dtypes.into_iter().flat_map(of).collect()
}

/// Those of a device: every key is fresh. Heads of each width, as many as make 2,048 lanes, and rows of as many tokens in all.
pub(super) fn list_on_device(quick: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for (width, wide) in [(64, ", d64"), (128, ""), (256, ", d256")] {
        for rows in [8, 2, 1] {
            let keys = if quick { 128 / rows } else { 16384 / rows };
            let heads = if quick { 2 } else { 2048 / width };
            let stored = Stored::Fresh;
            let dtype = DType::Bf16;
            let base = Rows { rows, queries: keys, keys, stored, dtype, heads, width, wide, causal: false };
            cases.extend([base, Rows { causal: true, ..base }].map(case));
        }
    }
    cases
}

/// Rows that are alike.
#[derive(Clone, Copy)]
struct Rows {
    rows: usize,
    queries: usize,
    keys: usize,
    stored: Stored,
    dtype: DType,
    heads: usize,
    width: usize,
    /// The width in the row's name, where rows are of several.
    wide: &'static str,
    causal: bool,
}

fn case(rows: Rows) -> Case {
    let Rows { rows, queries, keys, stored, dtype, heads: h, width: d, wide, causal } = rows;
    let name = match (stored, causal) {
        (Stored::Fresh, false) => "fresh",
        (Stored::Fresh, true) => "causal",
        (Stored::Packed, _) => "packed",
        (Stored::Pages, _) => "paged",
    };
    let size = dtype.size();
    let bytes = (2 * rows * (queries + keys) * h * d * size) as f64;
    let pairs =
        (rows * queries) as f64 * if causal { (2 * keys + 1 - queries) as f64 / 2.0 } else { keys as f64 };
    let flops = 4.0 * pairs * (h * d) as f64;
    let make = move |place: &Place| -> anyhow::Result<Made> {
        let stream = place.stream();
        let geometry = Geometry {
            num_qo_heads: h,
            num_kv_heads: h,
            head_dim_qk: d,
            head_dim_vo: d,
            q_dtype: dtype,
            kv_dtype: dtype,
        };
        let before = if stored == Stored::Fresh { 0 } else { keys - queries };
        let (fresh, pages) = (keys - before, before / PAGE_SIZE);
        let indptr = |each: usize| (0..=rows).map(|row| (row * each) as i32).collect::<Vec<_>>();
        let [cu_q, cu_p, cu_k, kv_indptr] = [queries, before, fresh, pages].map(indptr);
        let prefix_len = vec![before as i32; rows];
        let pages = rows * pages;
        let kv_indices: Vec<i32> = (0..pages).map(|page| (page * 77 % pages) as i32).collect();
        let prefix = match stored {
            Stored::Fresh => Prefix::None,
            Stored::Packed => Prefix::Packed { cu_p: &cu_p },
            Stored::Pages => Prefix::Pages {
                kv_indptr: &kv_indptr,
                kv_indices: &kv_indices,
                prefix_len: &prefix_len,
                page_size: PAGE_SIZE,
                page_start: None,
                num_pages: pages,
            },
        };
        let table = Table { cu_q: &cu_q, prefix, cu_k: &cu_k };
        let variant = if causal { Variant::causal(d) } else { Variant::full(d) };
        let (target, kernels) = (Target::of(place.device()), Kernels::Auto.on(place.device()));
        let options = ScheduleOptions { target, kernels, ..ScheduleOptions::default() };
        let mut work = WorkList::default();
        schedule(&geometry, &variant, &table, &options, &mut work)?;
        work.stage(&stream)?;
        let bytes = workspace_bytes(&work, options.workers);
        let mut workspace = place.scratch(bytes)?;
        let (queries, before, fresh) = (rows * queries, rows * before, rows * fresh);
        let q = place.filled(dtype, queries * h * d)?;
        let [k, v] = [place.filled(dtype, fresh * h * d)?, place.filled(dtype, fresh * h * d)?];
        let [old_k, old_v] = [place.filled(dtype, before * h * d)?, place.filled(dtype, before * h * d)?];
        let mut o = place.room(dtype, &[queries, h, d])?;
        Ok(Made::alone(move || {
            let frozen: &[usize] =
                if stored == Stored::Pages { &[pages, PAGE_SIZE, h, d] } else { &[before, h, d] };
            let params = AttendParams {
                work: &work,
                q: q.tensor(0, dtype, &[queries, h, d])?,
                k_prefix: if before > 0 { Some(old_k.tensor(0, dtype, frozen)?) } else { None },
                v_prefix: if before > 0 { Some(old_v.tensor(0, dtype, frozen)?) } else { None },
                k: k.tensor(0, dtype, &[fresh, h, d])?,
                v: v.tensor(0, dtype, &[fresh, h, d])?,
                o: o.tensor_mut(0, dtype, &[queries, h, d])?,
                lse: None,
                workspace: workspace.tensor_mut(0, DType::U8, &[bytes])?,
                workers: options.workers,
            };
            Ok(attend(&stream, params)?)
        }))
    };
    let many = if rows > 1 { format!("{rows} x ") } else { String::new() };
    let shape = format!("{many}{queries} of {keys}{wide}, {name}, {dtype}");
    Case { kernel: "dense", shape, dtype, cost: Cost { bytes, flops }, beside: None, make: Box::new(make) }
}
