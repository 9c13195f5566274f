//! Random batches with every option: the fast kernels against the oracle, judged by the gate itself.
//!
//! The recorded cases are 45; these are as many as one asks for (`PROPTEST_CASES`). Values are the synthetic
//! ones, whose scores have a real spread. Where the format can say it, the batch also goes through a file.
//! "The source" is the oracle moved by a stated amount, so that the gate's bound is about twice the dtype's
//! rounding: it does not hang on how the few entries of a small batch happen to round, and a wrong mask,
//! page or option is ten times as far.

use std::collections::BTreeMap;
use std::path::Path;

use mstar_attn_paged::{Mask, MaskEntries};
use mstar_kernels::DType;
use mstar_kernels::cpu::Isa;
use mstar_kernels::reference::paged::{Cache, Options, Paged};
use mstar_kernels::synth::{self, Exact, Kind};
use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

use super::*;
use crate::parity::case::Tolerance;
use crate::parity::compare;
use crate::parity::judge::compare_all;
use crate::parity::ops::{Engine, rounded};
use crate::parity::place::Place;

/// The CPU.
fn here() -> Place {
    Place::new(mstar_kernels::Device::Cpu).expect("the CPU is here")
}

/// One row: `(q_len, kept tokens, pages given back, dead slots of the first page)`.
type Row = (usize, usize, usize, usize);

#[derive(Clone, Debug)]
struct Batch {
    rows: Vec<Row>,
    page_size: usize,
    num_kv_heads: usize,
    group: usize,
    head_dim_qk: usize,
    head_dim_vo: usize,
    causal: bool,
    window_left: Option<usize>,
    logits_soft_cap: Option<f32>,
    sinks: bool,
    alibi: bool,
    /// One of so many rows has a custom mask; 0: none.
    masked: usize,
    /// Whether later rows begin with the pages of the first.
    shared: bool,
    seed: u64,
}

fn rows(most: usize) -> impl Strategy<Value = Vec<Row>> {
    let q_len = prop_oneof![4 => Just(1usize), 1 => Just(0), 4 => 2..20usize, 1 => 20..100usize];
    let kv_len = prop_oneof![1 => Just(0usize), 3 => 1..40usize, 3 => 40..300usize, 1 => 300..700usize];
    let given_back = prop_oneof![2 => Just(0usize), 1 => 1..4usize];
    prop::collection::vec((q_len, kv_len, given_back, 0..64usize), 0..=most)
}

fn batches() -> impl Strategy<Value = Batch> {
    let widths = prop_oneof![
        3 => prop::sample::select(vec![32usize, 64, 96, 128]).prop_map(|d| (d, d)),
        1 => (1..80usize, 1..80usize),
        1 => Just((192, 128)),
    ];
    let cap = prop_oneof![2 => Just(None), 1 => (1f32..30.0).prop_map(Some)];
    let window = prop_oneof![2 => Just(None), 1 => (0..64usize).prop_map(Some), 1 => Just(Some(1_000_000))];
    (
        (rows(4), prop::sample::select(vec![1usize, 2, 5, 16, 64]), 1..3usize),
        (prop::sample::select(vec![1usize, 2, 3, 4, 7, 8]), widths, any::<bool>(), window, cap),
        (any::<bool>(), any::<bool>(), 0..3usize, any::<bool>(), any::<u64>()),
    )
        .prop_map(
            |((rows, page_size, num_kv_heads), (group, widths, causal, window_left, cap), flags)| Batch {
                rows,
                page_size,
                num_kv_heads,
                group,
                head_dim_qk: widths.0,
                head_dim_vo: widths.1,
                causal,
                window_left,
                logits_soft_cap: cap,
                sinks: flags.0,
                alibi: flags.1,
                masked: flags.2,
                shared: flags.3,
                seed: flags.4,
            },
        )
}

/// A batch laid out in memory.
struct Laid<E> {
    q: Vec<E>,
    /// `[P, 2, S, G, max(D, Dv)]`: keys and values are views of it, each as wide as it is.
    kv: Vec<E>,
    width: usize,
    pages: usize,
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
    kv_last_page_len: Vec<i32>,
    kv_offset: Vec<i64>,
    page_start: Vec<i32>,
    masks: Vec<Option<Vec<bool>>>,
    sinks: Vec<f32>,
    slopes: Vec<f32>,
}

fn bits(seed: u64, at: usize) -> u64 {
    synth::chain(seed, at as u64)
}

impl Batch {
    fn heads(&self) -> usize {
        self.num_kv_heads * self.group
    }

    /// The row as it will be: rows that share pages have given none back.
    fn row(&self, at: usize) -> Row {
        let (q_len, kept, given_back, dead) = self.rows[at];
        match self.shared || kept == 0 {
            true => (q_len, kept, 0, 0),
            false => (q_len, kept, given_back, dead % self.page_size),
        }
    }

    fn lay<E: Unwritten + Exact>(&self) -> Laid<E> {
        let (s, g) = (self.page_size, self.num_kv_heads);
        let width = self.head_dim_qk.max(self.head_dim_vo);
        let mut laid = Laid {
            q: Vec::new(),
            kv: Vec::new(),
            width,
            pages: 0,
            qo_indptr: vec![0],
            kv_indptr: vec![0],
            kv_indices: Vec::new(),
            kv_last_page_len: Vec::new(),
            kv_offset: Vec::new(),
            page_start: Vec::new(),
            masks: Vec::new(),
            sinks: (0..self.heads()).map(|h| (bits(self.seed, h) % 800) as f32 / 100.0 - 4.0).collect(),
            slopes: (0..self.heads()).map(|h| 0.5f32.powi(h as i32 % 8 + 1)).collect(),
        };
        let mut slots: Vec<Vec<usize>> = Vec::new();
        for at in 0..self.rows.len() {
            let (q_len, kept, given_back, dead) = self.row(at);
            let used = kept + dead;
            let mut table: Vec<usize> = (laid.pages..laid.pages + used.div_ceil(s)).collect();
            if self.shared && at > 0 {
                let common = (self.row(0).1.min(kept) / s).min(table.len());
                let first = &laid.kv_indices[..laid.kv_indptr[1] as usize];
                (0..common).for_each(|page| table[page] = first[page] as usize);
            }
            laid.pages = laid.pages.max(table.iter().max().map_or(0, |page| page + 1));
            slots.push((dead..used).map(|slot| table[slot / s] * s + slot % s).collect());
            laid.kv_indices.extend(table.iter().map(|&page| page as i32));
            laid.kv_indptr.push(laid.kv_indices.len() as i32);
            laid.qo_indptr.push(laid.qo_indptr[at] + q_len as i32);
            laid.kv_last_page_len.push(if used == 0 { 0 } else { (used - 1) % s + 1 } as i32);
            laid.kv_offset.push((given_back * s) as i64);
            laid.page_start.push(dead as i32);
            let kv_len = given_back * s + used;
            let mask = |i: usize| !bits(self.seed ^ 1, i).is_multiple_of(4);
            let masked = self.masked > 0 && (bits(self.seed, at) as usize).is_multiple_of(self.masked);
            laid.masks.push(masked.then(|| (0..q_len * kv_len).map(mask).collect()));
        }
        // Pages lie in a random order, and one belongs to nobody.
        laid.pages += 1;
        let mut order: Vec<usize> = (0..laid.pages).collect();
        order.sort_by_key(|&page| bits(self.seed ^ 2, page));
        laid.kv_indices.iter_mut().for_each(|page| *page = order[*page as usize] as i32);
        // What nobody owns is NaN, and so is what no query of its row sees.
        laid.kv = vec![E::UNWRITTEN; laid.pages * 2 * s * g * width];
        for (row, slots) in slots.iter().enumerate() {
            for (j, &slot) in slots.iter().enumerate() {
                // A shared page holds the same content in every row.
                let owner =
                    if self.shared && j < self.row(0).1.min(self.row(row).1) / s * s { 0 } else { row };
                if !self.shared && !self.seen(row, j, laid.masks[row].as_deref()) {
                    continue;
                }
                let key = synth::chain(owner as u64 + 1, j as u64);
                let (page, slot) = (order[slot / s], slot % s);
                for (which, kind) in [(0, Kind::Key), (1, Kind::Value)] {
                    for head in 0..g {
                        let at = (((page * 2 + which) * s + slot) * g + head) * width;
                        synth::fill_lanes(self.seed, kind, 0, key, head, &mut laid.kv[at..at + width]);
                    }
                }
            }
        }
        let tokens = laid.qo_indptr[self.rows.len()] as usize;
        laid.q = vec![E::UNWRITTEN; tokens * self.heads() * self.head_dim_qk];
        for (at, out) in laid.q.chunks_exact_mut(self.head_dim_qk).enumerate() {
            let (token, head) = (at / self.heads(), at % self.heads());
            synth::fill_lanes(self.seed, Kind::Query, 0, synth::chain(0, token as u64), head, out);
        }
        laid
    }

    /// Whether any query of the row sees its kept token `j`.
    fn seen(&self, row: usize, j: usize, mask: Option<&[bool]>) -> bool {
        let (q_len, kept, given_back, dead) = self.row(row);
        let before = given_back * self.page_size + dead;
        let (kv_len, key) = (before + kept, before + j);
        (0..q_len).any(|i| {
            let position = (kv_len + i) as i64 - q_len as i64;
            let near = self.window_left.is_none_or(|w| key as i64 >= position - w as i64);
            let past = !self.causal || key as i64 <= position;
            near && past && mask.is_none_or(|mask| mask[i * kv_len + key])
        })
    }

    fn scale(&self) -> f32 {
        (self.head_dim_qk as f32).powf(-0.5)
    }

    fn reference<E: Unwritten>(&self, laid: &Laid<E>) -> mstar_kernels::reference::Attended {
        // The oracle's two arrays, each as wide as its own width.
        let (s, g) = (self.page_size, self.num_kv_heads);
        let apart = |which: usize, width: usize| -> Vec<E> {
            let rows = (0..laid.pages).flat_map(|page| {
                let from = (page * 2 + which) * s * g * laid.width;
                laid.kv[from..from + s * g * laid.width].chunks_exact(laid.width)
            });
            rows.flat_map(|row| row[..width].to_vec()).collect()
        };
        let (k, v) = (apart(0, self.head_dim_qk), apart(1, self.head_dim_vo));
        let masks: Vec<Option<&[bool]>> = laid.masks.iter().map(|mask| mask.as_deref()).collect();
        let kv_offset: Vec<usize> = laid.kv_offset.iter().map(|&offset| offset as usize).collect();
        let page_start: Vec<usize> = laid.page_start.iter().map(|&start| start as usize).collect();
        let answer = mstar_kernels::reference::paged(&Paged {
            q: &laid.q,
            cache: Cache::Split { k: &k, v: &v },
            qo_indptr: &laid.qo_indptr,
            kv_indptr: &laid.kv_indptr,
            kv_indices: &laid.kv_indices,
            kv_last_page_len: &laid.kv_last_page_len,
            num_qo_heads: self.heads(),
            num_kv_heads: g,
            head_dim_qk: self.head_dim_qk,
            head_dim_vo: self.head_dim_vo,
            page_size: s,
            sm_scale: f64::from(self.scale()),
            causal: self.causal,
            options: Options {
                window_left: self.window_left.map_or(-1, |w| w as i64),
                logits_soft_cap: self.logits_soft_cap.map_or(0.0, f64::from),
                sinks: self.sinks.then_some(&laid.sinks),
                alibi_slopes: self.alibi.then_some(&laid.slopes),
                masks: &masks,
                kv_offset: &kv_offset,
                page_start: &page_start,
            },
        });
        answer.expect("the batch is legal")
    }

    fn fast<E: Unwritten>(&self, laid: &Laid<E>) -> (Vec<f32>, Vec<f32>) {
        let (s, g, tokens) = (self.page_size, self.num_kv_heads, laid.qo_indptr[self.rows.len()] as usize);
        let kv = TensorRef::from_slice(&laid.kv, &[laid.pages, 2, s, g, laid.width]).unwrap();
        let part = |which, width| kv.select(1, which).unwrap().narrow(3, 0, width).unwrap();
        let entries: Vec<u8> = laid.masks.iter().flatten().flatten().map(|&seen| u8::from(seen)).collect();
        let mut indptr = vec![0i64];
        for mask in &laid.masks {
            indptr.push(indptr[indptr.len() - 1] + mask.as_ref().map_or(0, Vec::len) as i64);
        }
        let mask =
            (self.masked > 0).then_some(Mask { entries: MaskEntries::Bytes(&entries), indptr: &indptr });
        let batch = super::Batch {
            geometry: Geometry {
                num_qo_heads: self.heads(),
                num_kv_heads: g,
                head_dim_qk: self.head_dim_qk,
                head_dim_vo: self.head_dim_vo,
                page_size: s,
                q_dtype: E::DTYPE,
                kv_dtype: E::DTYPE,
            },
            variant: Variant {
                sm_scale: self.scale(),
                causal: self.causal,
                window_left: self.window_left,
                logits_soft_cap: self.logits_soft_cap,
                alibi: self.alibi,
                sinks: self.sinks,
            },
            table: PageTable {
                qo_indptr: &laid.qo_indptr,
                kv_indptr: &laid.kv_indptr,
                kv_indices: &laid.kv_indices,
                kv_last_page_len: &laid.kv_last_page_len,
                kv_offset: Some(&laid.kv_offset),
                page_start: Some(&laid.page_start),
                mask,
                num_pages: laid.pages,
            },
            q: TensorRef::from_slice(&laid.q, &[tokens, self.heads(), self.head_dim_qk]).unwrap(),
            k: part(0, self.head_dim_qk),
            v: part(1, self.head_dim_vo),
            sinks: self.sinks.then_some(&laid.sinks),
            alibi_slopes: self.alibi.then_some(&laid.slopes),
        };
        attend::<E>(&batch, &here()).expect("the batch is legal")
    }

    /// Judges the fast kernels on this batch by the gate, on every body that this machine runs.
    fn check<E: Unwritten + Exact>(&self) -> Result<(), TestCaseError> {
        let laid = self.lay::<E>();
        let tokens = laid.qo_indptr[self.rows.len()] as usize;
        let (heads, width) = (self.heads(), self.head_dim_vo);
        let source = Source::of(E::DTYPE, &self.reference(&laid));
        for &isa in Isa::supported() {
            let _forced = Isa::force(isa).expect("a supported body");
            let (o, lse) = self.fast(&laid);
            let tolerance = source.tolerance;
            let o = compare::floats(
                "out.o",
                E::DTYPE,
                &[tokens, heads, width],
                tolerance,
                &o,
                &source.out_o,
                &source.ref_o,
            );
            let lse = compare::floats(
                "out.lse",
                DType::F32,
                &[tokens, heads],
                tolerance,
                &lse,
                &source.out_lse,
                &source.ref_lse,
            );
            prop_assert!(o.passed() && lse.passed(), "{isa}: {o:?}\n{lse:?}\n{self:?}");
        }
        Ok(())
    }
}

/// The oracle's answer, and a source of a stated error.
struct Source {
    ref_o: Vec<f32>,
    ref_lse: Vec<f32>,
    out_o: Vec<f32>,
    out_lse: Vec<f32>,
    tolerance: Tolerance,
}

impl Source {
    fn of(dtype: DType, exact: &mstar_kernels::reference::Attended) -> Source {
        // Twice the rounding of the dtype for what is large, and a floor for what cancelled to nearly 0.
        let (relative, floor, bound) = match dtype {
            DType::Bf16 => (8e-3, 1e-3, 3e-2),
            DType::F16 => (1e-3, 1.5e-4, 4e-3),
            _ => (1e-6, 2e-6, 1e-4),
        };
        let moved: Vec<f64> = exact.o.iter().map(|x| x * (1.0 + relative) + floor).collect();
        let lse = |by: f64| exact.lse.iter().map(|x| (x + by) as f32).collect();
        Source {
            ref_o: exact.o.iter().map(|&x| x as f32).collect(),
            ref_lse: lse(0.0),
            out_o: rounded(dtype, &moved),
            out_lse: lse(1e-5),
            tolerance: Tolerance { atol: bound, rtol: bound },
        }
    }
}

/// The batch as a recorded case's file: only what the format can say.
fn written<E: Unwritten + Exact>(batch: &Batch, op: &str, folder: &Path) -> std::path::PathBuf {
    let laid = batch.lay::<E>();
    let source = Source::of(E::DTYPE, &batch.reference(&laid));
    let (heads, d, tokens) = (batch.heads(), batch.head_dim_qk, laid.qo_indptr[batch.rows.len()] as usize);
    let dtype = match E::DTYPE {
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        _ => Dtype::F32,
    };
    let out: Vec<u8> = match E::DTYPE {
        DType::Bf16 => source.out_o.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        DType::F16 => source.out_o.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        _ => bytemuck::cast_slice(&source.out_o).to_vec(),
    };
    let rows = batch.rows.len();
    let mut tensors: Vec<(&str, Dtype, Vec<usize>, &[u8])> = vec![
        ("in.q", dtype, vec![tokens, heads, d], bytemuck::cast_slice(&laid.q)),
        (
            "in.kv",
            dtype,
            vec![laid.pages, 2, batch.page_size, batch.num_kv_heads, d],
            bytemuck::cast_slice(&laid.kv),
        ),
        ("in.qo_indptr", Dtype::I32, vec![rows + 1], bytemuck::cast_slice(&laid.qo_indptr)),
        ("in.kv_indptr", Dtype::I32, vec![rows + 1], bytemuck::cast_slice(&laid.kv_indptr)),
        ("in.kv_indices", Dtype::I32, vec![laid.kv_indices.len()], bytemuck::cast_slice(&laid.kv_indices)),
        ("in.kv_last_page_len", Dtype::I32, vec![rows], bytemuck::cast_slice(&laid.kv_last_page_len)),
        ("out.o", dtype, vec![tokens, heads, d], &out),
        ("out.lse", Dtype::F32, vec![tokens, heads], bytemuck::cast_slice(&source.out_lse)),
        ("ref.o", Dtype::F32, vec![tokens, heads, d], bytemuck::cast_slice(&source.ref_o)),
        ("ref.lse", Dtype::F32, vec![tokens, heads], bytemuck::cast_slice(&source.ref_lse)),
    ];
    if batch.sinks {
        tensors.push(("in.sinks", Dtype::F32, vec![heads], bytemuck::cast_slice(&laid.sinks)));
    }
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    let mut params = json!({"sm_scale": batch.scale(), "causal": batch.causal, "page_size": batch.page_size});
    if let Some(window) = batch.window_left {
        params["window_left"] = json!(window);
    }
    if let Some(cap) = batch.logits_soft_cap {
        params["logits_soft_cap"] = json!(cap);
    }
    let tolerance = json!({"atol": source.tolerance.atol, "rtol": source.tolerance.rtol});
    let mstar = json!({"version": 1, "op": op, "source": "here", "params": params, "tolerance": tolerance});
    let metadata = std::collections::HashMap::from([("mstar".to_owned(), mstar.to_string())]);
    let path = folder.join("case.safetensors");
    std::fs::write(&path, safetensors::serialize(views, Some(metadata)).unwrap()).unwrap();
    path
}

/// The same batch as a file, through reader, both engines and gate.
fn through_a_file<E: Unwritten + Exact>(batch: &Batch) -> Result<(), TestCaseError> {
    let said = Batch {
        alibi: false,
        masked: 0,
        head_dim_vo: batch.head_dim_qk,
        rows: batch.rows.iter().map(|&(q_len, kv_len, ..)| (q_len, kv_len, 0, 0)).collect(),
        ..batch.clone()
    };
    let folder = tempfile::tempdir().unwrap();
    let op = if said.causal || said.seed.is_multiple_of(2) { "paged" } else { "cross" };
    let case = Case::read(&written::<E>(&said, op, folder.path()))
        .map_err(|e| TestCaseError::fail(format!("{e:#}")))?;
    for engine in [Engine::Reference, Engine::Fast] {
        let outputs =
            case.op.run(&case, engine, &here()).map_err(|e| TestCaseError::fail(format!("{e:?}")))?;
        for judgement in compare_all(&case, &outputs) {
            prop_assert!(judgement.passed(), "{engine:?}: {judgement:?}\n{said:?}");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn random_batches_with_every_option_f32(batch in batches()) {
        batch.check::<f32>()?;
        through_a_file::<f32>(&batch)?;
    }

    #[test]
    fn random_batches_with_every_option_bf16(batch in batches()) {
        batch.check::<bf16>()?;
        through_a_file::<bf16>(&batch)?;
    }

    #[test]
    fn random_batches_with_every_option_f16(batch in batches()) {
        batch.check::<f16>()?;
        through_a_file::<f16>(&batch)?;
    }
}

/// The gate of these tests is not so wide that it passes what is wrong: each single fault of a batch that the
/// oracle is told and the kernels are not must fail.
#[test]
fn the_gate_of_these_tests_sees_single_faults() {
    let right = Batch {
        rows: vec![(3, 200, 0, 0), (1, 333, 1, 2), (40, 60, 0, 0)],
        page_size: 16,
        num_kv_heads: 2,
        group: 4,
        head_dim_qk: 64,
        head_dim_vo: 64,
        causal: true,
        window_left: Some(50),
        logits_soft_cap: Some(5.0),
        sinks: true,
        alibi: true,
        masked: 1,
        shared: false,
        seed: 7,
    };
    let passes = |right: &Batch, wrong: &Batch| {
        let laid = right.lay::<bf16>();
        let source = Source::of(DType::Bf16, &right.reference(&laid));
        let (o, lse) = wrong.fast(&laid);
        let shape = [laid.qo_indptr[3] as usize, 8, 64];
        let o =
            compare::floats("out.o", DType::Bf16, &shape, source.tolerance, &o, &source.out_o, &source.ref_o);
        let lse = compare::floats(
            "out.lse",
            DType::F32,
            &shape[..2],
            source.tolerance,
            &lse,
            &source.out_lse,
            &source.ref_lse,
        );
        o.passed() && lse.passed()
    };
    assert!(passes(&right, &right));
    let faults = BTreeMap::from([
        ("window one short", Batch { window_left: Some(49), ..right.clone() }),
        ("window one long", Batch { window_left: Some(51), ..right.clone() }),
        ("window dropped", Batch { window_left: None, ..right.clone() }),
        ("cap dropped", Batch { logits_soft_cap: None, ..right.clone() }),
        ("sinks dropped", Batch { sinks: false, ..right.clone() }),
        ("alibi dropped", Batch { alibi: false, ..right.clone() }),
        ("mask dropped", Batch { masked: 0, ..right.clone() }),
    ]);
    for (fault, wrong) in &faults {
        assert!(!passes(&right, wrong), "{fault} passes");
    }
    let open = Batch { window_left: None, masked: 0, ..right.clone() };
    assert!(passes(&open, &open));
    assert!(!passes(&open, &Batch { causal: false, ..open.clone() }), "causal dropped passes");
}
