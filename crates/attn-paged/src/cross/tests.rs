use std::sync::Arc;

use mstar_core::attend::Softmax;
use mstar_core::kv::{KvEntries, PagedKv, PagedKvCache};
use mstar_core::resource::PaddedShape;
use mstar_core::step::{AttentionStep, Declaration, KvStep};
use mstar_core::{Attention, AttnOut, Engine, Ingest, PlannedStep, Query, Resource, Segment, Step};
use mstar_kernels::reference::paged::Options;
use mstar_kernels::synth::Kind;
use mstar_kernels::{Stream, TensorMut, TensorRef};

use super::{CrossAttention, CrossOptions};
use crate::OverPages;
use crate::rig::{self, D, G, H, L, close, plan_id, segment};

/// A decoder's cache, a cache of contexts, and cross-attention between them.
struct Decoder {
    engine: Engine,
    own: Arc<PagedKvCache>,
    context: Arc<PagedKvCache>,
    cross: Arc<CrossAttention>,
}

impl Decoder {
    fn new(page_size: usize, pages: usize, from_own: bool) -> Decoder {
        let cache =
            |name: &str| Arc::new(PagedKvCache::new(name.into(), rig::config(page_size, pages)).unwrap());
        let (own, context) = (cache("own"), cache("context"));
        let mut cx = rig::context("cross", &context, &Softmax::scaled(0.25));
        cx.query_from = from_own.then(|| Arc::clone(&own) as Arc<dyn PagedKv>);
        let cross = Arc::new(CrossAttention::new(&cx, CrossOptions::default()).unwrap());
        let resources: Vec<Arc<dyn Resource>> =
            vec![Arc::clone(&cross) as _, Arc::clone(&own) as _, Arc::clone(&context) as _];
        Decoder { engine: Engine::new(resources).unwrap(), own, context, cross }
    }

    fn planned(&self, step: Step, bucket: Option<PaddedShape>) -> PlannedStep {
        let admission = match bucket {
            None => self.engine.admit(step).unwrap(),
            Some(shape) => {
                let bucket = mstar_core::graph::Bucket { walk: "decode".into(), shape };
                self.engine.admit_in(step, &bucket).unwrap()
            }
        };
        self.engine.plan(admission.admitted().unwrap()).unwrap()
    }

    /// Writes a context of `k` and `v`, each `[n, G, D]` in every layer, once.
    fn encode(&self, request: &str, k: &[f32], v: &[f32]) {
        self.engine.ingest(&Ingest::new(request.into())).unwrap();
        let n = k.len() / (G * D);
        let planned = self.planned(contexts(Step::new("encode"), &[segment(request, "context", n)]), None);
        let shape = [n, G, D];
        for layer in 0..L {
            let entries = KvEntries::Nhd {
                k: TensorRef::from_slice(k, &shape).unwrap(),
                v: TensorRef::from_slice(v, &shape).unwrap(),
            };
            self.context.write_kv(&plan_id(&planned, "context"), layer, entries, &Stream::cpu()).unwrap();
        }
        self.engine.commit(planned).unwrap();
    }

    /// One layer of cross-attention: `o` and `lse`.
    fn attend(&self, planned: &PlannedStep, q: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let stream = Stream::cpu();
        let mut forward = planned.forward("main", &stream);
        forward.set_layer(1);
        let tokens = q.len() / (H * D);
        let (mut o, mut lse) = (vec![f32::NAN; tokens * H * D], vec![f32::NAN; tokens * H]);
        let out = AttnOut {
            o: TensorMut::from_slice(&mut o, &[tokens, H, D]).unwrap(),
            lse: Some(TensorMut::from_slice(&mut lse, &[tokens, H]).unwrap()),
        };
        let q = Query::Heads(TensorRef::from_slice(q, &[tokens, H, D]).unwrap());
        mstar_core::attend::attend(&*self.cross, &mut forward, q, None, out).unwrap();
        (o, lse)
    }
}

fn contexts(step: Step, segments: &[Segment]) -> Step {
    step.with("context", Declaration::Kv(KvStep { segments: segments.to_vec(), ..KvStep::default() }))
}

/// A decoder step: its own tokens, and a read of each request's context.
fn decode(rows: &[(&str, usize)]) -> Step {
    let own = rows.iter().map(|&(request, span)| segment(request, "main", span)).collect();
    let read: Vec<Segment> = rows.iter().map(|&(request, _)| segment(request, "context", 0)).collect();
    let step =
        Step::new("decode").with("own", Declaration::Kv(KvStep { segments: own, ..KvStep::default() }));
    contexts(step, &read)
}

#[test]
fn f35_a_context_of_1500_tokens_reads_the_same_whatever_the_decoder_appends() {
    for page_size in [1, 16, 64] {
        let decoder = Decoder::new(page_size, 1500usize.div_ceil(page_size) + 150, true);
        let mut v = vec![1f32; 1500 * G * D];
        v[1499 * G * D..].fill(1501.0);
        decoder.encode("a", &vec![0.0; 1500 * G * D], &v);
        let pages = decoder.context.store().stream(&"a".into(), &"context".into()).unwrap().pages;
        assert_eq!(pages.len(), 1500usize.div_ceil(page_size));
        let before = rig::pool(&decoder.context);
        let q = vec![0.5f32; H * D];
        let mut first = None;
        for turn in 0..100 {
            let planned = decoder.planned(decode(&[("a", 1)]), None);
            if turn % 33 == 0 {
                let (o, lse) = decoder.attend(&planned, &q);
                assert!(o.iter().all(|x| (x - 2.0).abs() < 2e-6), "page {page_size}: {}", o[0]);
                assert!(lse.iter().all(|x| (x - 7.313_22).abs() < 1e-5), "page {page_size}: {}", lse[0]);
                let first = first.get_or_insert_with(|| (o.clone(), lse.clone()));
                assert!(*first == (o, lse), "bitwise, turn {turn}");
            }
            decoder.engine.commit(planned).unwrap();
        }
        assert_eq!(before, rig::pool(&decoder.context), "the context's pages are never written again");
        assert_eq!(decoder.own.store().stream(&"a".into(), &"main".into()).unwrap().len, 100);
    }
}

#[test]
fn f35_short_contexts_under_longer_queries_match_the_oracle() {
    for page_size in [1, 16, 64] {
        let decoder = Decoder::new(page_size, 200, true);
        let lengths = [("a", 1), ("b", 16), ("c", 17)];
        let content = |name: &str, kind, n: usize| {
            let keys: Vec<Option<u64>> = (0..n).map(|p| Some(rig::key(name, "context", p))).collect();
            rig::inputs(kind, 1, &keys, G)
        };
        for (name, n) in lengths {
            decoder.encode(name, &content(name, Kind::Key, n), &content(name, Kind::Value, n));
        }
        let spans = [("c", 20), ("a", 3), ("b", 18)];
        let planned = decoder.planned(decode(&spans), None);
        let keys: Vec<Option<u64>> = spans
            .iter()
            .flat_map(|&(name, span)| (0..span).map(move |p| Some(rig::key(name, "main", p))))
            .collect();
        let q = rig::inputs(Kind::Query, 1, &keys, H);
        let (o, lse) = decoder.attend(&planned, &q);
        decoder.engine.abort(planned);
        let mut at = 0;
        for (name, span) in spans {
            let n = lengths.iter().find(|(other, _)| *other == name).unwrap().1;
            let (k, v) = (content(name, Kind::Key, n), content(name, Kind::Value, n));
            let of = |width: usize| at * width..(at + span) * width;
            let (want_o, want_lse) =
                rig::over(&q[of(H * D)], &k, &v, span, n, false, 0.25, Options::default());
            assert!(close(&o[of(H * D)], &want_o) && close(&lse[of(H)], &want_lse), "{name} {page_size}");
            at += span;
        }
    }
}

#[test]
fn queries_may_come_from_the_step_and_padding_sees_nothing() {
    let decoder = Decoder::new(4, 32, false);
    decoder.encode("a", &vec![0.0; 6 * G * D], &vec![3.0; 6 * G * D]);
    let queries = AttentionStep { queries: Some(vec![segment("a", "main", 2)]), ..Default::default() };
    let step = contexts(Step::new("decode"), &[segment("a", "context", 0)])
        .with("cross", Declaration::Attention(queries));
    // In a bucket the contexts' own plan, which has no query tokens, is padded too.
    for (bucket, tokens) in [(None, 2), (Some(PaddedShape { rows: 3, tokens: 4 }), 4)] {
        let planned = decoder.planned(step.clone(), bucket);
        let (o, lse) = decoder.attend(&planned, &vec![0.5; tokens * H * D]);
        decoder.engine.abort(planned);
        assert!(o[..2 * H * D].iter().all(|x| (x - 3.0).abs() < 1e-6));
        assert!(lse[..2 * H].iter().all(|x| (x - 6f32.ln()).abs() < 1e-6));
        assert!(o[2 * H * D..].iter().all(|x| x.to_bits() == 0));
        assert!(lse[2 * H..].iter().all(|x| *x == f32::NEG_INFINITY));
    }
}

#[test]
fn cross_rows_in_a_bucket_have_the_bits_of_rows_without_one() {
    let decoder = Decoder::new(4, 64, true);
    for (name, n) in [("a", 17), ("b", 5), ("c", 40)] {
        let content = |kind| {
            let keys: Vec<Option<u64>> = (0..n).map(|p| Some(rig::key(name, "context", p))).collect();
            rig::inputs(kind, 1, &keys, G)
        };
        decoder.encode(name, &content(Kind::Key), &content(Kind::Value));
    }
    let rows = [("c", 1), ("a", 1), ("b", 1)];
    for real in 1..=3 {
        let step = || decode(&rows[..real]);
        let keys: Vec<Option<u64>> = rows.iter().map(|&(name, _)| Some(rig::key(name, "main", 0))).collect();
        let attended = |bucket: Option<usize>| {
            let planned = decoder.planned(step(), bucket.map(|rows| PaddedShape { rows, tokens: rows }));
            let tokens = bucket.unwrap_or(real);
            let mut q = rig::inputs(Kind::Query, 1, &keys[..real], H);
            q.resize(tokens * H * D, f32::NAN);
            let (o, lse) = decoder.attend(&planned, &q);
            decoder.engine.abort(planned);
            (o, lse)
        };
        let (want_o, want_lse) = attended(None);
        // Buckets that the rows fill, whose context plan has no row left for padding, and larger ones.
        for bucket in [real, real + 1, 8] {
            let (o, lse) = attended(Some(bucket));
            let (of_o, of_lse) = (real * H * D, real * H);
            let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same(&o[..of_o], &want_o) && same(&lse[..of_lse], &want_lse), "{real} in {bucket}");
            assert!(o[of_o..].iter().all(|x| x.to_bits() == 0), "{real} in {bucket}");
            assert!(lse[of_lse..].iter().all(|x| *x == f32::NEG_INFINITY), "{real} in {bucket}");
        }
    }
}

#[test]
fn an_unchanged_cross_plan_is_kept() {
    let decoder = Decoder::new(4, 64, true);
    decoder.encode("a", &vec![0.0; 6 * G * D], &vec![3.0; 6 * G * D]);
    decoder.encode("b", &vec![0.0; 3 * G * D], &vec![5.0; 3 * G * D]);
    for _ in 0..5 {
        let planned = decoder.planned(decode(&[("a", 1), ("b", 1)]), None);
        let (o, _) = decoder.attend(&planned, &vec![0.5; 2 * H * D]);
        assert!((o[0] - 3.0).abs() < 1e-6 && (o[H * D] - 5.0).abs() < 1e-6);
        decoder.engine.commit(planned).unwrap();
    }
    let counts = decoder.cross.plans().counts();
    assert_eq!((counts.made, counts.unchanged), (1, 4), "the decoder's own growth changes nothing");
    let planned = decoder.planned(decode(&[("b", 1), ("a", 1)]), None);
    let (o, _) = decoder.attend(&planned, &vec![0.5; 2 * H * D]);
    assert!((o[0] - 5.0).abs() < 1e-6);
    decoder.engine.commit(planned).unwrap();
    assert_eq!(decoder.cross.plans().counts().made, 2, "another order is another plan");
}

#[test]
fn what_has_no_context_or_no_meaning_is_refused() {
    let decoder = Decoder::new(4, 64, true);
    decoder.encode("a", &vec![0.0; 2 * G * D], &vec![3.0; 2 * G * D]);
    let own = vec![segment("a", "main", 1)];
    let step =
        Step::new("decode").with("own", Declaration::Kv(KvStep { segments: own, ..KvStep::default() }));
    let admitted = decoder.engine.admit(step).unwrap().admitted().unwrap();
    let failed = decoder.engine.plan(admitted).unwrap_err();
    assert!(failed.to_string().contains("request a reads no context"), "{failed}");
    let queries = AttentionStep { queries: Some(vec![segment("a", "main", 1)]), ..Default::default() };
    let said = decoder.engine.admit(decode(&[("a", 1)]).with("cross", Declaration::Attention(queries)));
    assert!(said.unwrap_err().to_string().contains("its query rows are those of own"));
    assert_eq!(decoder.engine.outstanding(), 0);

    // Two requests with the same text and other contexts must never share the decoder's pages.
    let shared = mstar_core::kv::KvConfig { prefix_cache: true, ..rig::config(4, 64) };
    let own: Arc<dyn Resource> = Arc::new(PagedKvCache::new("own".into(), shared).unwrap());
    let resources = vec![own, Arc::clone(&decoder.context) as _, Arc::clone(&decoder.cross) as _];
    let said = Engine::new(resources).map(|_| ()).unwrap_err().to_string();
    assert!(said.contains("may not skip the work of cross"), "{said}");

    let build = |change: fn(&mut mstar_core::attend::BuildContext)| {
        let mut cx = rig::context("cross", &decoder.context, &Softmax::scaled(1.0));
        change(&mut cx);
        CrossAttention::new(&cx, CrossOptions::default()).map(|_| ()).unwrap_err().to_string()
    };
    assert!(build(|cx| cx.geometry.softmax.window_left = Some(4)).contains("window_left"));
    assert!(build(|cx| cx.geometry.softmax.alibi_slopes = Some(vec![0.1; H].into())).contains("alibi"));
    assert!(build(|cx| cx.query_from = cx.kv_cache.clone()).contains("backend: paged"));
    assert!(build(|cx| cx.kv_cache = None).contains("kv_cache"));
    assert!(build(|cx| cx.geometry.num_qo_heads = 3).contains("num_kv_heads"));
    assert!(!decoder.cross.prefix_skip_safe() && !decoder.cross.requires_kv_write());
}
