//! Paged attention: prefill, append, decode, cascade, and planning.

use std::hint::black_box;
use std::sync::Arc;

use mstar_attn_paged::{
    Geometry, Inputs, Outputs, PageTable, Plan, PlanOptions, Schedule, Variant, Workspace, run, run_scaled_in,
};
use mstar_kernels::fp8::store_heads;
use mstar_kernels::{Buffer, DType, Device, TensorRef};
use rayon::prelude::*;

use super::super::limits::fold;
use super::{Case, Cost, Made, Place, longer, odd, strewn};
use crate::bench::measure::PlainReads;

/// Width of a head and tokens a page, where a row says no other.
const D: usize = 128;
const S: usize = 16;
/// Tokens that are quantised for a pool.
const CODED: usize = 1 << 12;

/// A batch of equal rows.
#[derive(Clone, Copy)]
struct Rows {
    rows: usize,
    q_len: usize,
    kv_len: usize,
    /// Leading tokens whose pages all rows share.
    shared: usize,
    h: usize,
    g: usize,
    /// Width of a head.
    d: usize,
    /// Tokens a page.
    page: usize,
    dtype: DType,
    /// Whether keys and values are kept in e4m3.
    codes: bool,
    /// What happens to scores beside their scale.
    mods: Mods,
    cascade: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mods {
    None,
    SoftCap,
    Alibi,
}

/// The cases of this family.
pub(super) fn list(quick: bool) -> Vec<Case> {
    let shrink = if quick { 8 } else { 1 };
    let base = Rows {
        rows: 1,
        q_len: 1,
        kv_len: 1,
        shared: 0,
        h: 32,
        g: 8,
        d: D,
        page: S,
        dtype: DType::Bf16,
        codes: false,
        mods: Mods::None,
        cascade: true,
    };
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        let n = 1024 / if quick { 4 } else { 1 };
        cases.push(attention("prefill", Rows { q_len: n, kv_len: n, h: 8, dtype, ..base }));
    }
    let n = 4096 / shrink;
    cases.push(attention("prefill", Rows { q_len: n, kv_len: n, ..base }));
    for dtype in [DType::F32, DType::Bf16] {
        cases.push(attention("append", Rows { q_len: 128, kv_len: 16384 / shrink, dtype, ..base }));
    }
    for (rows, kv_len, page) in [(1, 8192, S), (1, 65536, S), (1, 65536, 64), (1, 65536, 128), (64, 1024, S)]
    {
        for dtype in [DType::F32, DType::Bf16] {
            cases.push(attention("decode", Rows { rows, kv_len: kv_len / shrink, page, dtype, ..base }));
        }
    }
    for cascade in [false, true] {
        let shared = 16384 / shrink;
        cases.push(attention("cascade", Rows { rows: 16, kv_len: shared + 64, shared, cascade, ..base }));
    }
    for (rows, kv_len) in [(64, 8192), (1, 65536)] {
        cases.push(plan(Rows { rows, kv_len, ..base }, Change::LastPage));
    }
    cases.extend(device_plans(base));
    cases
}

impl Rows {
    fn geometry(&self) -> Geometry {
        Geometry {
            num_qo_heads: self.h,
            num_kv_heads: self.g,
            head_dim_qk: self.d,
            head_dim_vo: self.d,
            page_size: self.page,
            q_dtype: self.dtype,
            kv_dtype: if self.codes { DType::E4m3 } else { self.dtype },
        }
    }

    fn shape(&self) -> String {
        let Rows { rows, q_len, kv_len, h, g, .. } = self;
        let dtype = if self.codes { "fp8".into() } else { self.dtype.to_string() };
        let length = if *q_len == 1 { format!("{rows} x") } else { format!("{q_len} of") };
        let mut shape = format!("{length} {kv_len}, {h}/{g}, {dtype}");
        if self.page != S {
            shape += &format!(", p{}", self.page);
        }
        if self.d != D {
            shape += &format!(", d{}", self.d);
        }
        match self.mods {
            Mods::None => {}
            Mods::SoftCap => shape += ", soft cap",
            Mods::Alibi => shape += ", alibi",
        }
        shape
    }

    fn variant(&self) -> Variant {
        let logits_soft_cap = (self.mods == Mods::SoftCap).then_some(30.0);
        Variant { logits_soft_cap, alibi: self.mods == Mods::Alibi, ..Variant::causal(self.d) }
    }

    /// Keys that its query tokens see, summed over all of them.
    fn pairs(&self) -> f64 {
        let first = self.kv_len - self.q_len + 1;
        self.rows as f64 * self.q_len as f64 * (first + self.kv_len) as f64 / 2.0
    }

    /// Useful work: every key and value once, queries and outputs once; unmasked pairs.
    fn cost(&self) -> Cost {
        let own = (self.kv_len - self.shared) * self.rows + self.shared;
        let head = if self.codes { self.d + size_of::<f32>() } else { self.d * self.dtype.size() };
        let kv = 2 * own * self.g * head;
        let qo = 2 * self.rows * self.q_len * self.h * self.d * self.dtype.size();
        let bytes = (kv + qo) as f64;
        Cost { bytes, flops: 4.0 * (self.h * self.d) as f64 * self.pairs() }
    }

    fn tables(&self) -> Tables {
        let per_row = self.kv_len.div_ceil(self.page);
        let shared = self.shared / self.page;
        let own = per_row - shared;
        let pages = shared + self.rows * own;
        let kv_indices = (0..self.rows)
            .flat_map(|row| (0..shared).chain(shared + row * own..shared + (row + 1) * own))
            .map(strewn(pages))
            .collect();
        Tables {
            qo_indptr: (0..=self.rows).map(|row| (row * self.q_len) as i32).collect(),
            kv_indptr: (0..=self.rows).map(|row| (row * per_row) as i32).collect(),
            kv_indices,
            kv_last_page_len: vec![((self.kv_len - 1) % self.page + 1) as i32; self.rows],
            pages,
        }
    }

    fn options(&self) -> PlanOptions {
        PlanOptions { cascade: self.cascade, ..PlanOptions::default() }
    }
}

struct Tables {
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
    kv_last_page_len: Vec<i32>,
    pages: usize,
}

impl Tables {
    fn view(&self) -> PageTable<'_> {
        PageTable {
            qo_indptr: &self.qo_indptr,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            kv_last_page_len: &self.kv_last_page_len,
            num_pages: self.pages,
            ..PageTable::default()
        }
    }
}

/// Those of a device: rows of several batches and heads, then one of them with other pages, widths and groups.
pub(super) fn list_on_device(quick: bool) -> Vec<Case> {
    let few = |rows: usize| if quick { rows.min(2) } else { rows };
    let short = |tokens: usize| if quick { tokens.min(8192) / 64 } else { tokens };
    let base = Rows {
        rows: few(64),
        q_len: 1,
        kv_len: short(8192),
        shared: 0,
        h: 32,
        g: 8,
        d: D,
        page: S,
        dtype: DType::Bf16,
        codes: false,
        mods: Mods::None,
        cascade: true,
    };
    let batches = [
        (
            32,
            8,
            &[
                (1, 8192),
                (1, 131_072),
                (16, 1024),
                (16, 8192),
                (64, 1024),
                (64, 8192),
                (256, 1024),
                (256, 4096),
            ][..],
        ),
        (64, 8, &[(1, 8192), (64, 8192), (256, 4096)]),
        (32, 32, &[(1, 8192), (64, 8192)]),
    ];
    let row = |h, g, rows, kv_len| Rows { rows: few(rows), kv_len: short(kv_len), h, g, ..base };
    let mut rows: Vec<Rows> = batches
        .into_iter()
        .flat_map(|(h, g, lengths)| lengths.iter().map(move |&(rows, kv_len)| row(h, g, rows, kv_len)))
        .collect();
    // 64/8 heads are above.
    rows.extend([1, 64, 128].map(|page| Rows { page, ..base }));
    rows.extend([64, 256].map(|d| Rows { d, ..base }));
    rows.extend([8, 56, 128].map(|h| Rows { h, ..base }));
    let decode = |rows| attention("decode", rows);
    let held = decode(base);
    let mut cases = Vec::new();
    for rows in rows {
        let near = [Rows { kv_len: longer(rows.kv_len), ..rows }, Rows { rows: odd(rows.rows), ..rows }];
        let other =
            rows.page != S || rows.d != D || ![(32, 8), (64, 8), (32, 32)].contains(&(rows.h, rows.g));
        let case = if other { decode(rows).beside(&held, 0.85) } else { decode(rows) };
        cases.extend(case.with_neighbours(near.map(decode)));
    }
    let n = short(8192);
    for (rows, n) in [(1, 8192), (4, 4096), (16, 1024), (1, 32768)] {
        let n = short(n);
        cases.push(attention("prefill", Rows { rows: few(rows), q_len: n, kv_len: n, ..base }));
    }
    cases.push(attention("prefill", Rows { rows: 1, q_len: n, kv_len: n, codes: true, ..base }));
    // D 128 without any is above.
    let mods =
        [(D, Mods::SoftCap), (D, Mods::Alibi), (64, Mods::None), (64, Mods::SoftCap), (64, Mods::Alibi)];
    cases.extend(
        mods.map(|(d, mods)| attention("prefill", Rows { rows: 1, q_len: n, kv_len: n, d, mods, ..base })),
    );
    for (rows, kv_len) in [(1, 8192), (16, 8192), (64, 8192), (256, 1024)] {
        cases.push(decode(Rows { rows: few(rows), kv_len: short(kv_len), codes: true, ..base }));
    }
    cases.extend(device_plans(base));
    cases
}

fn attention(kernel: &'static str, rows: Rows) -> Case {
    let shape = match (kernel, rows.cascade) {
        ("cascade", true) => format!("{} x {}, shared, {}", rows.rows, rows.kv_len, rows.dtype),
        ("cascade", false) => format!("{} x {}, flat, {}", rows.rows, rows.kv_len, rows.dtype),
        _ => rows.shape(),
    };
    let make = move |place: &Place| -> anyhow::Result<Made> {
        let stream = place.stream();
        let tables = rows.tables();
        let plan = |schedule: Schedule| -> anyhow::Result<Plan> {
            let options = PlanOptions { device: place.device(), schedule, ..rows.options() };
            let mut plan = Plan::new(&rows.geometry(), &rows.variant(), &tables.view(), &options)?;
            plan.stage(&stream)?;
            Ok(plan)
        };
        let slopes = match rows.mods {
            Mods::Alibi => Some(place.filled(DType::F32, rows.h)?),
            _ => None,
        };
        let on_device = kernel == "decode" && !place.is_cpu();
        let plans = match on_device {
            true => vec![plan(Schedule::Invariant)?, plan(Schedule::Throughput)?],
            false => vec![plan(Schedule::Invariant)?],
        };
        let scratch = |plan: &Plan| Ok(Workspace::on(place.device(), plan.workspace_bytes())?);
        let mut workspaces = plans.iter().map(scratch).collect::<anyhow::Result<Vec<Workspace>>>()?;
        let (t, h, d, dtype) = (rows.rows * rows.q_len, rows.h, rows.d, rows.dtype);
        let pool = [tables.pages, rows.page, rows.g, d];
        let len: usize = pool.iter().product();
        let q = place.filled(dtype, t * h * d)?;
        let (k, v, scales) = match rows.codes {
            false => (place.filled(dtype, len)?, place.filled(dtype, len)?, None),
            true => {
                let [k, k_scales] = codes(place, &pool)?;
                let [v, v_scales] = codes(place, &pool)?;
                (k, v, Some([k_scales, v_scales]))
            }
        };
        let (k, v) = (Arc::new(k), Arc::new(v));
        let kv_dtype = rows.geometry().kv_dtype;
        // What bounds decode is the read of its keys and values; the others also compute.
        let reads = (kernel == "decode" && place.is_cpu()).then(|| plain_reads(&k, &v, &tables));
        let mut o = place.room(dtype, &[t, h, d])?;
        let mut work = move |schedule: Schedule| -> anyhow::Result<()> {
            let which = usize::from(schedule == Schedule::Throughput);
            let inputs = Inputs {
                q: q.tensor(0, dtype, &[t, h, d])?,
                k: k.tensor(0, kv_dtype, &pool)?,
                v: v.tensor(0, kv_dtype, &pool)?,
                sinks: None,
                alibi_slopes: slopes.as_ref().map(|all| all.tensor(0, DType::F32, &[rows.h])).transpose()?,
            };
            let outputs = Outputs { o: o.tensor_mut(0, dtype, &[t, h, d])?, lse: None };
            let Some([k_scales, v_scales]) = &scales else {
                return Ok(run(&plans[which], &stream, &mut workspaces[which], inputs, outputs)?);
            };
            let workspace = workspaces[which].view()?;
            let beside =
                [k_scales.tensor(0, DType::F32, &pool[..3])?, v_scales.tensor(0, DType::F32, &pool[..3])?];
            Ok(run_scaled_in(&plans[which], &stream, workspace, inputs, beside, outputs)?)
        };
        if on_device {
            return Ok(Made::twice(work));
        }
        Ok(Made { work: Box::new(move || work(Schedule::Invariant)), throughput: None, step: None, reads })
    };
    Case { kernel, shape, dtype: rows.dtype, cost: rows.cost(), beside: None, make: Box::new(make) }
}

/// A pool `[P, S, G, D]` of codes, and their scales `[P, S, G]`.
fn codes(place: &Place, pool: &[usize; 4]) -> anyhow::Result<[Buffer; 2]> {
    let [pages, page, g, d] = *pool;
    // Quantising on the host takes its time: a stretch over and over.
    let some = pages.min(CODED.div_ceil(page));
    let host = Place::on(Device::Cpu)?;
    let plain = host.filled(DType::F32, some * page * g * d)?;
    let (mut codes, mut scales) =
        (host.room(DType::E4m3, &[some, page, g, d])?, host.room(DType::F32, &[some, page, g])?);
    let slots: Vec<i64> = (0..(some * page) as i64).collect();
    store_heads(
        &host.stream(),
        TensorRef::from_slice(&slots, &[slots.len()])?,
        plain.tensor(0, DType::F32, &[slots.len(), g, d])?,
        codes.tensor_mut(0, DType::E4m3, &[some, page, g, d])?,
        scales.tensor_mut(0, DType::F32, &[some, page, g])?,
    )?;
    Ok([
        place.tiled(codes, pool.iter().product())?,
        place.tiled(scales, pages * page * g * size_of::<f32>())?,
    ])
}

/// Reads of the pages of `k` and `v` that `tables` name, by all threads of the current pool: each takes neighbouring
/// stretches, of the memory or of the page lists.
fn plain_reads(k: &Arc<Buffer>, v: &Arc<Buffer>, tables: &Tables) -> PlainReads {
    /// Bytes that a thread takes at a time.
    const STRETCH: usize = 1 << 20;
    fn words(buffer: &Buffer) -> anyhow::Result<TensorRef<'_>> {
        Ok(buffer.tensor(0, DType::I64, &[buffer.len() / 8])?)
    }
    let both = [k.clone(), v.clone()];
    let in_order = move || {
        for buffer in &both {
            let view = words(buffer)?;
            let words = view.as_slice::<i64>().unwrap_or_default();
            black_box(words.par_chunks(STRETCH / 8).map(fold).reduce(|| 0, |a, b| a ^ b));
        }
        Ok(())
    };
    let (k, v, order, pages) = (k.clone(), v.clone(), tables.kv_indices.clone(), tables.pages);
    let bytes = (k.len() + v.len()) as f64;
    let in_page_order = move || {
        let (k, v) = (words(&k)?, words(&v)?);
        let (k, v) = (k.as_slice::<i64>().unwrap_or_default(), v.as_slice::<i64>().unwrap_or_default());
        let page = k.len() / pages;
        let of = |id: &i32| {
            let at = *id as usize * page;
            fold(&k[at..at + page]) ^ fold(&v[at..at + page])
        };
        let ids = (STRETCH / 8).div_ceil(2 * page);
        black_box(
            order
                .par_chunks(ids)
                .map(|ids| ids.iter().map(of).fold(0, |a, b| a ^ b))
                .reduce(|| 0, |a, b| a ^ b),
        );
        Ok(())
    };
    PlainReads { bytes, in_order: Box::new(in_order), in_page_order: Box::new(in_page_order) }
}

/// How a batch differs from the one that was planned before it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    /// One row has one more token, or one less.
    LastPage,
    /// Every row has other keys, in another number of leaves.
    All,
    /// Every row has one more token, which takes a page now and then.
    Token,
}

/// Planning, and staging where a device runs it; nothing bounds it but the host, whose clock it is timed by.
fn plan(rows: Rows, change: Change) -> Case {
    let make = move |place: &Place| -> anyhow::Result<Made> {
        let stream = place.stream();
        // Cut for a card also where there is none.
        let device = match (change, place.device()) {
            (Change::All | Change::Token, Device::Cpu) => Device::Cuda(0),
            (_, device) => device,
        };
        let (geometry, variant) = (rows.geometry(), Variant::causal(D));
        let options = PlanOptions { device, ..rows.options() };
        let shorter = match change {
            Change::LastPage => rows.kv_len,
            Change::All => rows.kv_len - rows.kv_len / 8,
            Change::Token => rows.kv_len - S,
        };
        let mut tables = [Rows { kv_len: shorter, ..rows }.tables(), rows.tables()];
        tables[0].pages = tables[1].pages;
        let mut plan = Plan::new(&geometry, &variant, &tables[0].view(), &options)?;
        let mut turn = 0;
        Ok(Made::alone(move || {
            turn += 1;
            // Half of the steps that take a token stand before a border of pages.
            let (which, last) = match change {
                Change::LastPage => (0, if turn % 2 == 0 { S } else { 1 }),
                Change::All => (turn % 2, S),
                Change::Token => (turn % S / (S / 2), (turn % S + S / 2) % S + 1),
            };
            let table = &mut tables[which];
            match change {
                Change::LastPage => table.kv_last_page_len[0] = last as i32,
                _ => table.kv_last_page_len.fill(last as i32),
            }
            plan.replan(&geometry, &variant, &table.view(), &options)?;
            if stream.device() != Device::Cpu {
                plan.stage(&stream)?;
            }
            Ok(())
        }))
    };
    let shape = match change {
        Change::LastPage => format!("{} x {}, page {S}", rows.rows, rows.kv_len),
        Change::All => format!("{} x {}, page {S}, all new", rows.rows, rows.kv_len),
        Change::Token => format!("{} x {}, page {S}, +1 token", rows.rows, rows.kv_len),
    };
    Case {
        kernel: "plan",
        shape,
        dtype: rows.dtype,
        cost: Cost::default(),
        beside: None,
        make: Box::new(make),
    }
}

/// Plans for a device.
fn device_plans(base: Rows) -> impl Iterator<Item = Case> {
    let lengths = [(64, 8192, Change::All), (64, 8192, Change::Token), (64, 65536, Change::Token)];
    lengths.into_iter().map(move |(rows, kv_len, change)| plan(Rows { rows, kv_len, ..base }, change))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn useful_work_counts_shared_keys_once_and_hidden_pairs_never() {
        let base = Rows {
            rows: 2,
            q_len: 1,
            kv_len: 48,
            shared: 32,
            h: 4,
            g: 2,
            d: D,
            page: S,
            dtype: DType::F32,
            codes: false,
            mods: Mods::None,
            cascade: true,
        };
        assert_eq!(base.tables().pages, 4);
        let kv = (2 * (32 + 2 * 16) * 2 + 2 * 2 * 4) * D * 4;
        assert_eq!(base.cost().bytes, kv as f64);
        let square = Rows { rows: 1, q_len: 4, kv_len: 4, shared: 0, ..base };
        assert_eq!(square.pairs(), 10.0);
        assert_eq!(square.cost().flops, (4 * 4 * D * 10) as f64);
    }
}
