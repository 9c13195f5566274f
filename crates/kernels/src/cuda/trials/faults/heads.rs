//! Plans, page tables, heads and merges.

use super::super::{Family, NAN, Row, Setting, families, heads::OverHeads, ragged, row, whole};
use super::*;
use crate::cpu::scatter::scatter_at;
use crate::lse::{Merged, Partial, merge_all_natural_at};

const BF16: DType = DType::Bf16;

#[test]
fn f11_hostile_tables_are_refused_before_a_device_is_asked() {
    let (geometry, variant) = (narrow(1, 4, BF16), Variant::causal(64));
    let options = PlanOptions { device: DEVICE, ..PlanOptions::default() };
    let pages = [0, 1, 2];
    let good = Rows::of(4, &[(1, 8, &pages)]);
    let plan = |rows: &Rows| Plan::<Heads>::new(&geometry, &variant, &rows.table(3), &options);
    assert_eq!(plan(&good).unwrap().kv_lens().collect::<Vec<_>>(), [8]);
    for last in [0, 5, -1, i32::MAX] {
        let why = plan(&Rows { last: vec![last], ..good.clone() }).unwrap_err().to_string();
        assert!(why.contains("kv_last_page_len[0]") && why.contains(&last.to_string()), "{why}");
    }
    for page in [-1, 3, i32::MAX] {
        let why = plan(&Rows { indices: vec![0, page], ..good.clone() }).unwrap_err().to_string();
        assert!(why.contains("kv_indices[1]") && why.contains(&page.to_string()), "{why}");
    }
    assert!(plan(&Rows { indptr: vec![0, 3], ..good.clone() }).is_err());
    assert!(plan(&Rows { qo: vec![1, 2], ..good }).is_err());
}

#[test]
fn f12_no_extra_page_at_a_boundary() {
    let Some(owned) = stream("f12_no_extra_page_at_a_boundary") else { return };
    let stream = owned.stream();
    let geometry = narrow(2, 4, BF16);
    let mut layer = Paged::new(&stream, geometry, Variant::causal(64), 9, |_, _, _, _| None);
    // Pages in no order.
    let pages = [7, 2, 5, 0];
    for token in 0..13usize {
        let slot = pages[token / 4] as i64 * 4 + token as i64 % 4;
        let slots = put(&stream, &slot.to_ne_bytes());
        let slots = slots.tensor(0, DType::I64, &[1]).unwrap();
        for (pool, number) in [(&mut layer.k, 0.0), (&mut layer.v, token as f32)] {
            let entry = put(&stream, &encoded(BF16, &[number; 64]));
            let entry = entry.tensor(0, BF16, &[1, 1, 64]).unwrap();
            scatter_at(&stream, slots, entry, pool.tensor_mut(0, BF16, &[9, 4, 1, 64]).unwrap()).unwrap();
            stream.synchronize().unwrap();
        }
        let n = token + 1;
        let (o, lse) = layer.eager(&stream, &Rows::of(4, &[(1, n, &pages)]));
        let want = token as f32 / 2.0;
        assert!(o.iter().all(|&o| near(o, want, 4e-3)), "{n} tokens: {}, not {want}", o[0]);
        assert!(lse.iter().all(|&lse| near(lse, (n as f32).ln(), 1e-5)), "{n} tokens: {}", lse[0]);
    }
}

#[test]
fn f13_stale_entries_past_a_row_of_the_table_are_never_read() {
    let Some(owned) = stream("f13_stale_entries_past_a_row") else { return };
    let stream = owned.stream();
    // Pages 0..3 are ours, others are another's, whose keys would win.
    let number = |is_value: bool, page: usize, slot: usize, _: usize| {
        Some(if page < 3 { (page * 4 + slot) as f32 / 16.0 } else { if is_value { 9.0 } else { 100.0 } })
    };
    let layer = Paged::new(&stream, narrow(2, 4, BF16), Variant::full(64), 12, number);
    let before = [take(&stream, &layer.k, layer.k.len()), take(&stream, &layer.v, layer.v.len())];
    let capacity = Some(Capacity { rows: 4, tokens: 4, pages: 64 });
    let others: Vec<i32> = (3..12).cycle().take(64).collect();
    let long = Rows::of(4, &[(1, 36, &others), (1, 20, &others)]);
    let mut slot = layer.slot(&stream, &long, capacity).unwrap();
    layer.replayed(&stream, &mut slot, &long);
    let own = Rows::of(4, &[(1, 11, &[2, 0, 1])]);
    let want = layer.replayed(&stream, &mut slot, &own);
    assert!(want.0[0] < 1.0, "{}", want.0[0]);
    for stale in [3, -1, i32::MAX, 12] {
        let mut rows = own.clone();
        rows.indices.resize(64, stale);
        layer.replayed(&stream, &mut slot, &long);
        let got = layer.replayed(&stream, &mut slot, &rows);
        assert!(got.0 == want.0 && got.1 == want.1, "stale entries of {stale}");
    }
    let after = [take(&stream, &layer.k, layer.k.len()), take(&stream, &layer.v, layer.v.len())];
    assert!(before == after, "the pool changed");
}

#[test]
fn f15_any_group_size_maps_heads_right() {
    let Some(owned) = stream("f15_any_group_size_maps_heads_right") else { return };
    let stream = owned.stream();
    let groups: &[usize] = if is_emulated() { &[1, 5, 64] } else { &[1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 64] };
    for &group in groups {
        let geometry = Geometry { num_qo_heads: 2 * group, num_kv_heads: 2, ..narrow(1, 4, BF16) };
        let number =
            |is_value: bool, _: usize, _: usize, head: usize| Some(if is_value { head as f32 } else { 0.0 });
        let layer = Paged::new(&stream, geometry, Variant::causal(64), 6, number);
        // A decode row, a prefill.
        let (o, _) = layer.eager(&stream, &Rows::of(4, &[(1, 9, &[3, 1, 2]), (18, 20, &[0, 5, 4, 3, 2])]));
        for (at, &o) in o.iter().enumerate() {
            let (token, head) = (at / 64 / (2 * group), at / 64 % (2 * group));
            assert_eq!(o, (head / group) as f32, "group {group}, token {token}, head {head}");
        }
    }
    let geometry = Geometry { num_qo_heads: 5, num_kv_heads: 2, ..narrow(1, 4, BF16) };
    let rows = Rows::of(4, &[(1, 3, &[0])]);
    let options = PlanOptions { device: DEVICE, ..PlanOptions::default() };
    let refused = Plan::<Heads>::new(&geometry, &Variant::causal(64), &rows.table(1), &options);
    assert!(refused.unwrap_err().to_string().contains("must divide num_qo_heads"));
}

#[test]
fn f16_a_small_batch_in_the_bucket_of_a_large_one_equals_one_in_fresh_memory() {
    let Some(owned) = stream("f16_a_small_batch_in_the_bucket") else { return };
    let stream = owned.stream();
    // 16 rows of 64 pages; fewer where they are slow.
    let (rows, keys) = if is_emulated() { (3, 530) } else { (16, 1024) };
    let long: Vec<Row> = (0..rows).map(|at| row(100 + at as u64, 1, keys)).collect();
    let short = [row(1, 1, 11), row(2, 1, 16)];
    for (at, family) in families().into_iter().enumerate() {
        if !whole() && at % 3 != 0 {
            continue;
        }
        // Over blocks keys are counted in blocks, and queries are the family's.
        let company = family.company(6);
        let in_blocks = company[1].q == company[0].q;
        let (long, short) = match in_blocks {
            true => (company.clone(), vec![company[3]]),
            false => (long.clone(), short.to_vec()),
        };
        // Leaves of several states, and none that is split.
        for before in [long.clone(), company] {
            // The workspace and the outputs start as NaN, and hold what the batch before left.
            let set = Setting { before, pad: 6, junk: NAN, ..Setting::of(BF16) };
            let fresh = Setting { before: Vec::new(), pad: 0, ..set.clone() };
            let (used, fresh) = (family.run(&stream, &set, &short), family.run(&stream, &fresh, &short));
            assert_eq!(used, fresh, "{}", family.name());
        }
    }
}

#[test]
fn f17_padded_rows_yield_nothing_whatever_the_output_held() {
    let Some(owned) = stream("f17_padded_rows_yield_nothing") else { return };
    let stream = owned.stream();
    let number = |is_value: bool, page: usize, slot: usize, _: usize| {
        Some(if is_value { (page + slot) as f32 / 8.0 } else { slot as f32 / 64.0 })
    };
    let layer = Paged::new(&stream, narrow(2, 4, BF16), Variant::causal(64), 16, number);
    let capacity = Some(Capacity { rows: 8, tokens: 8, pages: 40 });
    let pages: Vec<i32> = (0..16).map(|page| page * 7 % 16).collect();
    let pool = take(&stream, &layer.v, layer.v.len());
    let batches = [[6, 1, 13], [2, 2, 40], [9, 17, 4], [5, 0, 7]];
    let rows = |lengths: &[usize]| {
        let rows: Vec<(usize, usize, &[i32])> = lengths.iter().map(|&kv| (1, kv, &pages[kv % 3..])).collect();
        Rows::of(4, &rows)
    };
    let mut slot = layer.slot(&stream, &rows(&batches[0]), capacity).unwrap();
    for lengths in batches {
        let (o, lse) = layer.replayed(&stream, &mut slot, &rows(&lengths));
        let eager = layer.eager(&stream, &rows(&lengths));
        assert!(o[..3 * 2 * 64] == eager.0 && lse[..3 * 2] == eager.1, "{lengths:?}");
        assert!(o[3 * 2 * 64..].iter().all(|&o| o == 0.0), "{lengths:?}: padding yields something");
        assert!(lse[3 * 2..].iter().all(|&lse| lse == f32::NEG_INFINITY), "{lengths:?}");
    }
    assert_eq!(pool, take(&stream, &layer.v, layer.v.len()), "padding wrote to the pool");
}

#[test]
fn f18_the_bytes_asked_for_are_enough_and_one_less_is_refused_with_both() {
    // What the largest cases need follows from the plan alone.
    let options = PlanOptions { device: DEVICE, ..PlanOptions::default() };
    let geometry = |h, g, d| Geometry {
        num_qo_heads: h,
        num_kv_heads: g,
        head_dim_qk: d,
        head_dim_vo: d,
        ..narrow(1, 16, BF16)
    };
    let shared: Vec<i32> = (0..64).collect();
    let rows: Vec<(usize, usize, &[i32])> = vec![(1, 1, &shared[..]); 512];
    let (many, capacity) = (Rows::of(16, &rows), Some(Capacity { rows: 512, tokens: 512, pages: 512 }));
    let plan = Plan::<Heads>::new(
        &geometry(32, 2, 256),
        &Variant::causal(256),
        &many.table(64),
        &PlanOptions { capacity, ..options },
    );
    assert!(plan.unwrap().workspace_bytes() < 64 << 20);
    let Some(owned) = stream("f18_the_bytes_asked_for_are_enough") else { return };
    let stream = owned.stream();
    let number = |is_value: bool, page: usize, slot: usize, _: usize| {
        Some(if is_value { (page % 7 + slot) as f32 / 8.0 } else { slot as f32 / 64.0 })
    };
    // Rows of two leaves, whose states lie in the workspace; then rows of many queries.
    let (few, many) = if is_emulated() { (6, 2) } else { (512, 128) };
    let decode: Vec<(usize, usize, &[i32])> = vec![(1, 700, &shared[..]); few];
    let append: Vec<(usize, usize, &[i32])> = vec![(if few == 6 { 18 } else { 577 }, 600, &shared[..]); many];
    let shapes = if is_emulated() {
        [(geometry(8, 2, 64), decode), (geometry(8, 2, 64), append)]
    } else {
        [(geometry(32, 2, 256), decode), (geometry(32, 4, 256), append)]
    };
    for (geometry, rows) in shapes {
        let layer = Paged::new(&stream, geometry, Variant::causal(64), 64, number);
        let rows = Rows::of(16, &rows);
        let mut slot = layer.slot(&stream, &rows, None).unwrap();
        slot.plan.stage(&stream).unwrap();
        let bytes = slot.plan.workspace_bytes();
        layer.launch(&stream, &mut slot).unwrap();
        let want = layer.results(&stream, &slot);
        // Exactly the bytes, wherever they start, with a guard behind them.
        for shift in [0, 1, 63] {
            slot.workspace = put(&stream, &vec![0xab; bytes + 8192]);
            let mut exact = Exact { layer: &layer, slot: &mut slot, at: 4096 + shift };
            exact.launch(&stream, bytes).unwrap();
            assert!(layer.results(&stream, &slot) == want, "{bytes} bytes from {shift} on");
            let held = take(&stream, &slot.workspace, bytes + 8192);
            let guards = held[..4096 + shift].iter().chain(&held[4096 + shift + bytes..]);
            assert!(guards.into_iter().all(|&byte| byte == 0xab), "a guard was written");
        }
        if bytes > 64 {
            let mut exact = Exact { layer: &layer, slot: &mut slot, at: 4096 };
            match exact.launch(&stream, bytes - 1).unwrap_err() {
                Error::Workspace { needed, available } => {
                    assert!((available, needed) == (bytes - 1, bytes), "{needed} {available}");
                }
                other => panic!("{other}"),
            }
            // The plan that was there still runs.
            exact.launch(&stream, bytes).unwrap();
            assert!(layer.results(&stream, &slot) == want);
        }
    }
}

/// A run in so many bytes of a slot's workspace.
struct Exact<'a> {
    layer: &'a Paged,
    slot: &'a mut Slot,
    at: usize,
}

impl Exact<'_> {
    fn launch(&mut self, stream: &Stream, bytes: usize) -> Result<()> {
        let Geometry { num_qo_heads: h, num_kv_heads: g, head_dim_qk: d, page_size: s, .. } =
            self.layer.geometry;
        let (tokens, pages) = (self.slot.plan.num_tokens(), self.layer.pages);
        attend(
            stream,
            AttendParams {
                work: self.slot.plan.work(),
                q: self.slot.q.tensor(0, BF16, &[tokens, h, d])?,
                k: self.layer.k.tensor(0, BF16, &[pages, s, g, d])?,
                v: self.layer.v.tensor(0, BF16, &[pages, s, g, d])?,
                kv_scales: None,
                sinks: None,
                alibi_slopes: None,
                o: self.slot.o.tensor_mut(0, BF16, &[tokens, h, d])?,
                lse: Some(self.slot.lse.tensor_mut(0, DType::F32, &[tokens, h])?),
                workspace: self.slot.workspace.tensor_mut(self.at, DType::U8, &[bytes])?,
                workers: 1,
            },
        )
    }
}

#[test]
fn f20_several_query_tokens_of_a_decode_row_see_no_later_one() {
    let Some(owned) = stream("f20_several_query_tokens_of_a_decode_row") else { return };
    let stream = owned.stream();
    for dtype in [BF16, DType::F16, DType::F32] {
        // Positions as values: pages are used in order of position.
        let number = |is_value: bool, page: usize, slot: usize, _: usize| {
            Some(if is_value { (page * 4 + slot) as f32 } else { 0.0 })
        };
        let layer = Paged::new(&stream, narrow(1, 4, dtype), Variant::causal(64), 25, number);
        let pages: Vec<i32> = (0..25).collect();
        let rows = |lengths: [usize; 4]| Rows::of(4, &lengths.map(|kv| (3, kv, &pages[..])));
        let capacity = Some(Capacity { rows: 6, tokens: 16, pages: 60 });
        let mut slot = layer.slot(&stream, &rows([7; 4]), capacity).unwrap();
        for lengths in [[7; 4], [7, 8, 9, 100]] {
            let eager = layer.eager(&stream, &rows(lengths));
            let graph = layer.replayed(&stream, &mut slot, &rows(lengths));
            assert!(graph.0[..12 * 64] == eager.0 && graph.1[..12] == eager.1, "{dtype} {lengths:?}");
            for (row, kv) in lengths.into_iter().enumerate() {
                for token in 0..3 {
                    let seen = kv - 2 + token;
                    let want = (seen - 1) as f32 / 2.0;
                    let at = row * 3 + token;
                    let (o, lse) = (eager.0[at * 64], eager.1[at]);
                    assert!(
                        near(o, want, 5e-3),
                        "{dtype} {lengths:?} row {row} token {token}: {o}, not {want}"
                    );
                    assert!(near(lse, (seen as f32).ln(), 1e-5), "{dtype} row {row} token {token}: {lse}");
                }
                let alone = layer.eager(&stream, &Rows::of(4, &[(3, kv, &pages)]));
                assert!(eager.0[row * 192..][..192] == alone.0 && eager.1[row * 3..][..3] == alone.1);
            }
        }
    }
}

#[test]
fn f21_log_sum_exps_are_natural_and_parts_join_to_the_whole() {
    let Some(owned) = stream("f21_log_sum_exps_are_natural") else { return };
    let stream = owned.stream();
    let join = |parts: &[(Vec<f32>, Vec<f32>)], width: usize| {
        let rows = parts[0].1.len();
        let on: Vec<(Buffer, Buffer)> = (parts.iter())
            .map(|(o, lse)| (put(&stream, &encoded(DType::F32, o)), put(&stream, &encoded(DType::F32, lse))))
            .collect();
        let there: Vec<Partial<'_>> = (on.iter())
            .map(|(o, lse)| Partial {
                o: o.tensor(0, DType::F32, &[rows, 1, width]).unwrap(),
                lse: lse.tensor(0, DType::F32, &[rows, 1]).unwrap(),
            })
            .collect();
        let (mut o, mut lse) =
            (put(&stream, &vec![NAN; 4 * rows * width]), put(&stream, &vec![NAN; 4 * rows]));
        let mut out = Merged {
            o: o.tensor_mut(0, DType::F32, &[rows, 1, width]).unwrap(),
            lse: lse.tensor_mut(0, DType::F32, &[rows, 1]).unwrap(),
        };
        merge_all_natural_at(&stream, &there, &mut out).unwrap();
        let read = |buffer: &Buffer| floats(DType::F32, &take(&stream, buffer, buffer.len()));
        (read(&o), read(&lse))
    };
    let (o, lse) = join(&[(vec![0.0], vec![std::f32::consts::LN_2]), (vec![10.0], vec![8f32.ln()])], 1);
    assert!(near(o[0], 8.0, 1e-6) && near(lse[0], std::f32::consts::LN_10, 1e-6), "{o:?} {lse:?}");
    // A context in one pass, and in parts.
    let pages = if is_emulated() { 42 } else { 256 };
    for (dtype, bound) in [(BF16, 1e-3), (DType::F32, 2e-6)] {
        let number = |is_value: bool, page: usize, slot: usize, _: usize| {
            let of = super::super::memory::noise(&[u64::from(is_value), page as u64, slot as u64]);
            Some(if is_value { of } else { of / 8.0 })
        };
        let layer = Paged::new(&stream, narrow(1, 16, dtype), Variant::full(64), pages, number);
        let ids: Vec<i32> = (0..pages as i32).collect();
        let (whole, whole_lse) = layer.eager(&stream, &Rows::of(16, &[(1, 16 * pages, &ids)]));
        for parts in [2, 3, 7] {
            let each = pages.div_ceil(parts);
            let of = |ids: &[i32]| layer.eager(&stream, &Rows::of(16, &[(1, 16 * ids.len(), ids)]));
            let parts: Vec<_> = ids.chunks(each).map(of).collect();
            let (o, lse) = join(&parts, 64);
            assert!(near(lse[0], whole_lse[0], 1e-6), "{dtype}: {} and {}", lse[0], whole_lse[0]);
            for (o, whole) in o.iter().zip(&whole) {
                assert!((o - whole).abs() <= bound, "{dtype}: {o} in parts, {whole} in one pass");
            }
        }
    }
}

#[test]
fn f40_the_companion_of_a_long_row_changes_no_bit() {
    let Some(owned) = stream("f40_the_companion_of_a_long_row") else { return };
    let stream = owned.stream();
    let family = OverHeads { g: 2, ..OverHeads::new(7, 64, 64) };
    // Lengths around tiles, leaves, and the one of the report.
    let lengths: &[usize] =
        if is_emulated() { &[511, 513] } else { &[63, 64, 65, 511, 512, 513, 1024, 4097, 19802] };
    for &kv in lengths {
        let victim = row(7, 1, kv);
        let set = Setting::of(BF16);
        let alone = &family.run(&stream, &set, &[victim])[0];
        let neighbours = if is_emulated() { vec![1, 3] } else { vec![1, 7, 63] };
        for many in neighbours {
            let mut batch: Vec<Row> = ragged(many).iter().map(|of| row(of.id + 50, of.q, of.kv)).collect();
            for at in [0, many / 2, many] {
                batch.insert(at, victim);
                let set = Setting { place: 3 + at as u64, pad: at % 2 * 8, ..set.clone() };
                assert_eq!(&family.run(&stream, &set, &batch)[at], alone, "{kv} keys among {many}");
                batch.remove(at);
            }
        }
        for prefill in [9, 10] {
            let batch = [row(8, prefill, prefill), victim];
            assert_eq!(&family.run(&stream, &set, &batch)[1], alone, "{kv} keys beside {prefill} tokens");
        }
    }
}
