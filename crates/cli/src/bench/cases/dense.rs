//! Dense attention: fresh keys behind a prefix that is packed, in pages, or not there.

use mstar_kernels::dense::{
    AttendParams, Geometry, Prefix, Table, Variant, attend, schedule, workspace_bytes,
};
use mstar_kernels::paged::ScheduleOptions;
use mstar_kernels::work::WorkList;
use mstar_kernels::{Buffer, DType, Stream};

use super::{Case, Cost, Made, filled};

const H: usize = 8;
const D: usize = 64;
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
    dtypes.into_iter().flat_map(|dtype| stored.map(|stored| case(keys / 4, keys, stored, dtype))).collect()
}

fn case(queries: usize, keys: usize, stored: Stored, dtype: DType) -> Case {
    let name = match stored {
        Stored::Fresh => "fresh",
        Stored::Packed => "packed",
        Stored::Pages => "paged",
    };
    let size = dtype.size();
    let bytes = (2 * (queries + keys) * H * D * size) as f64;
    let flops = (4 * queries * keys * H * D) as f64;
    let make = move || -> anyhow::Result<Made> {
        let geometry = Geometry {
            num_qo_heads: H,
            num_kv_heads: H,
            head_dim_qk: D,
            head_dim_vo: D,
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
        let options = ScheduleOptions::default();
        let mut work = WorkList::default();
        schedule(&geometry, &Variant::full(D), &table, &options, &mut work)?;
        let bytes = workspace_bytes(&work, options.workers);
        let mut workspace = Buffer::zeroed(bytes)?;
        let q = filled(dtype, queries * H * D)?;
        let [k, v] = [filled(dtype, fresh * H * D)?, filled(dtype, fresh * H * D)?];
        let [old_k, old_v] = [filled(dtype, before * H * D)?, filled(dtype, before * H * D)?];
        let mut o = Buffer::for_tensor(dtype, &[queries, H, D])?;
        Ok(Made::alone(move || {
            let frozen: &[usize] =
                if stored == Stored::Pages { &[pages, PAGE_SIZE, H, D] } else { &[before, H, D] };
            let params = AttendParams {
                work: &work,
                q: q.tensor(0, dtype, &[queries, H, D])?,
                k_prefix: if before > 0 { Some(old_k.tensor(0, dtype, frozen)?) } else { None },
                v_prefix: if before > 0 { Some(old_v.tensor(0, dtype, frozen)?) } else { None },
                k: k.tensor(0, dtype, &[fresh, H, D])?,
                v: v.tensor(0, dtype, &[fresh, H, D])?,
                o: o.tensor_mut(0, dtype, &[queries, H, D])?,
                lse: None,
                workspace: workspace.tensor_mut(0, DType::U8, &[bytes])?,
                workers: options.workers,
            };
            Ok(attend(&Stream::cpu(), params)?)
        }))
    };
    let shape = format!("{queries} of {keys}, {name}, {dtype}");
    Case { kernel: "dense", shape, dtype, cost: Cost { bytes, flops }, make: Box::new(make) }
}
