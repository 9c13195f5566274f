//! Dense attention: fresh keys behind a prefix that is packed, in pages, or not there.

use mstar_kernels::DType;
use mstar_kernels::dense::{
    AttendParams, Geometry, Prefix, Table, Variant, attend, schedule, workspace_bytes,
};
use mstar_kernels::paged::{ScheduleOptions, Target};
use mstar_kernels::work::WorkList;

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
        queries: keys / 4,
        keys,
        stored: Stored::Fresh,
        dtype: DType::F32,
        heads: 8,
        width: 64,
        causal: false,
    };
    let of = |dtype| stored.map(|stored| case(Rows { stored, dtype, ..base }));
    dtypes.into_iter().flat_map(of).collect()
}

/// Those of a device: every key is fresh.
pub(super) fn list_on_device(quick: bool) -> Vec<Case> {
    let keys = if quick { 128 } else { 16384 };
    let base = Rows {
        queries: keys,
        keys,
        stored: Stored::Fresh,
        dtype: DType::Bf16,
        heads: if quick { 2 } else { 16 },
        width: 128,
        causal: false,
    };
    vec![case(base), case(Rows { causal: true, ..base })]
}

/// One row.
#[derive(Clone, Copy)]
struct Rows {
    queries: usize,
    keys: usize,
    stored: Stored,
    dtype: DType,
    heads: usize,
    width: usize,
    causal: bool,
}

fn case(rows: Rows) -> Case {
    let Rows { queries, keys, stored, dtype, heads: h, width: d, causal } = rows;
    let name = match (stored, causal) {
        (Stored::Fresh, false) => "fresh",
        (Stored::Fresh, true) => "causal",
        (Stored::Packed, _) => "packed",
        (Stored::Pages, _) => "paged",
    };
    let size = dtype.size();
    let bytes = (2 * (queries + keys) * h * d * size) as f64;
    let pairs = queries as f64 * if causal { (2 * keys + 1 - queries) as f64 / 2.0 } else { keys as f64 };
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
        let (cu_p, kv_indptr) = ([0, before as i32], [0, pages as i32]);
        let kv_indices: Vec<i32> = (0..pages).map(|page| (page * 77 % pages) as i32).collect();
        let prefix = match stored {
            Stored::Fresh => Prefix::None,
            Stored::Packed => Prefix::Packed { cu_p: &cu_p },
            Stored::Pages => Prefix::Pages {
                kv_indptr: &kv_indptr,
                kv_indices: &kv_indices,
                prefix_len: &cu_p[1..],
                page_size: PAGE_SIZE,
                page_start: None,
                num_pages: pages,
            },
        };
        let table = Table { cu_q: &[0, queries as i32], prefix, cu_k: &[0, fresh as i32] };
        let variant = if causal { Variant::causal(d) } else { Variant::full(d) };
        let options = ScheduleOptions { target: Target::of(place.device()), ..ScheduleOptions::default() };
        let mut work = WorkList::default();
        schedule(&geometry, &variant, &table, &options, &mut work)?;
        work.stage(&stream)?;
        let bytes = workspace_bytes(&work, options.workers);
        let mut workspace = place.scratch(bytes)?;
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
    let shape = format!("{queries} of {keys}, {name}, {dtype}");
    Case { kernel: "dense", shape, dtype, cost: Cost { bytes, flops }, beside: None, make: Box::new(make) }
}
