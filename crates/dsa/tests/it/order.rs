//! Calls out of order, of another plan, of another shape: refused, with nothing changed.

use std::sync::Arc;

use mstar_core::attend::{
    IndexFormat, IndexStore, Rank, Selection, SparseAttention, SparseFactory, StepShape,
};
use mstar_core::kv::{KvConfig, KvLayout, PagedKvCache};
use mstar_core::step::{AttentionStep, Declaration, Fork, KvStep};
use mstar_core::{AttnOut, Engine, Error, Query, Resource};
use mstar_dsa::{DsaFactory, DsaManager};
use mstar_kernels::{DType, Device, Stream, TensorMut, TensorRef};

use crate::rig::{C, DI, E, H, HI, Inputs, Rig, Setup, kv_step, plan_id, segment, step};

/// A rig whose request has 12 tokens, past `topk`.
fn rig() -> Rig {
    let rig = Rig::new(Setup::default());
    rig.ingest(&["a", "b"]);
    rig.step(&[("a", 12)], None);
    rig
}

#[test]
fn a_shared_layer_before_its_full_one_is_out_of_order() {
    let rig = rig();
    let planned = rig.planned(step(&[("a", 1)]), None);
    let stream = Stream::cpu();
    let mut forward = planned.forward("main", &stream);
    forward.set_layer(1);
    let said = rig.dsa.shared_selection(&forward).unwrap_err();
    assert!(matches!(said, Error::Order { call: "shared_selection", .. }), "{said}");
    assert!(
        said.to_string().contains("layer 1 attends the pick of layer 0, which has not selected"),
        "{said}"
    );
    // Layer 0 selects; layer 3 shares layer 2's, which has not.
    let inputs = Inputs::new(&rig, 1);
    forward.set_layer(0);
    let indexed = inputs.indexed(&rig);
    rig.dsa.store_keys(&forward, indexed.keys).unwrap();
    rig.dsa.select(&mut forward, indexed.q, indexed.weights).unwrap();
    forward.set_layer(1);
    assert_eq!(rig.dsa.shared_selection(&forward).unwrap().layer(), 0);
    forward.set_layer(3);
    let said = rig.dsa.shared_selection(&forward).unwrap_err().to_string();
    assert!(
        said.contains("layer 3 attends the pick of layer 2") && said.contains("layer 0 was the last"),
        "{said}"
    );
    // A pick lives no longer than its forward.
    let again = planned.forward("main", &stream);
    assert!(rig.dsa.shared_selection(&again).is_err());
    rig.engine.abort(planned);
}

#[test]
fn keys_are_stored_before_they_are_scored_and_by_full_layers_alone() {
    let rig = rig();
    let planned = rig.planned(step(&[("a", 1)]), None);
    let stream = Stream::cpu();
    let mut forward = planned.forward("main", &stream);
    let inputs = Inputs::new(&rig, 1);
    let indexed = inputs.indexed(&rig);
    let said = rig.dsa.select(&mut forward, indexed.q, indexed.weights).unwrap_err().to_string();
    assert!(said.contains("layer 0 are not stored yet; call store_keys first"), "{said}");
    assert_eq!(forward.last_selection(), None);
    rig.dsa.store_keys(&forward, indexed.keys).unwrap();
    // Those of layer 0 are not those of layer 2.
    forward.set_layer(2);
    assert!(rig.dsa.select(&mut forward, indexed.q, indexed.weights).is_err());
    forward.set_layer(3);
    let said = rig.dsa.store_keys(&forward, indexed.keys).unwrap_err().to_string();
    assert!(said.contains("layer 3 shares the pick of layer 2; full layers are [0, 2]"), "{said}");
    assert!(rig.dsa.select(&mut forward, indexed.q, indexed.weights).is_err());
    rig.engine.abort(planned);
}

/// Attends with whatever pick, into outputs that are thrown away.
fn attend(
    rig: &Rig,
    forward: &mstar_core::Forward<'_>,
    selection: Option<&Selection>,
) -> mstar_core::Result<()> {
    let q = [0f32; H * (C + E)];
    let (mut o, mut lse) = ([0f32; H * C], [0f32; H]);
    let query = Query::Absorbed {
        nope: TensorRef::from_slice(&q[..H * C], &[1, H, C])?,
        pe: TensorRef::from_slice(&q[H * C..], &[1, H, E])?,
    };
    let out = AttnOut {
        o: TensorMut::from_slice(&mut o, &[1, H, C])?,
        lse: Some(TensorMut::from_slice(&mut lse, &[1, H])?),
    };
    rig.dsa.attend(forward, selection, query, out)
}

#[test]
fn a_pick_serves_its_own_plan_its_own_layers_and_until_the_next() {
    let rig = rig();
    let planned = rig.planned(step(&[("a", 1)]), None);
    let stream = Stream::cpu();
    let mut forward = planned.forward("main", &stream);
    let inputs = Inputs::new(&rig, 1);
    let indexed = inputs.indexed(&rig);
    let said = attend(&rig, &forward, None).unwrap_err().to_string();
    assert!(said.contains("some query sees more than 8 keys"), "{said}");
    let never = Selection::new(forward.plan_id().clone(), 0, 1);
    assert!(attend(&rig, &forward, Some(&never)).unwrap_err().to_string().contains("buffers hold none"));
    let mut picks = [7i32; 8];
    let mut copy = |selection: &Selection| {
        let to = TensorMut::from_slice(&mut picks, &[1, 8]).unwrap();
        rig.dsa.copy_selection(selection, to).map_err(|error| error.to_string())
    };
    assert!(copy(&never).unwrap_err().contains("hold none"));

    rig.dsa.store_keys(&forward, indexed.keys).unwrap();
    let first = rig.dsa.select(&mut forward, indexed.q, indexed.weights).unwrap();
    attend(&rig, &forward, Some(&first)).unwrap();
    copy(&first).unwrap();
    forward.set_layer(2);
    let said = attend(&rig, &forward, Some(&first)).unwrap_err().to_string();
    assert!(said.contains("layer 2 attends the pick of layer 2, not that of layer 0"), "{said}");
    rig.dsa.store_keys(&forward, indexed.keys).unwrap();
    let second = rig.dsa.select(&mut forward, indexed.q, indexed.weights).unwrap();
    forward.set_layer(3);
    attend(&rig, &forward, Some(&second)).unwrap();
    // Layer 0's was overwritten.
    forward.set_layer(1);
    assert!(attend(&rig, &forward, Some(&first)).unwrap_err().to_string().contains("hold that of layer 2"));
    assert!(copy(&first).is_err() && copy(&second).is_ok());
    rig.engine.commit(planned).unwrap();

    // A step on, the pick is nobody's.
    let planned = rig.planned(step(&[("a", 1)]), None);
    let mut forward = planned.forward("main", &stream);
    assert!(matches!(copy(&second), Err(said) if said.contains("no plan")));
    assert!(matches!(attend(&rig, &forward, Some(&second)), Err(Error::Order { .. } | Error::Step { .. })));
    forward.set_layer(3);
    let said = attend(&rig, &forward, Some(&second)).unwrap_err().to_string();
    assert!(said.contains("another plan's"), "{said}");
    rig.engine.abort(planned);
}

#[test]
fn a_pick_that_another_forward_of_the_plan_overwrote_is_refused() {
    let rig = rig();
    let planned = rig.planned(step(&[("a", 1)]), None);
    let stream = Stream::cpu();
    let (mut first, mut second) = (planned.forward("main", &stream), planned.forward("main", &stream));
    let inputs = Inputs::new(&rig, 1);
    let indexed = inputs.indexed(&rig);
    let pick = |forward: &mut mstar_core::Forward<'_>| {
        rig.dsa.store_keys(forward, indexed.keys).unwrap();
        rig.dsa.select(forward, indexed.q, indexed.weights).unwrap()
    };
    let of_first = pick(&mut first);
    attend(&rig, &first, Some(&of_first)).unwrap();
    // Other keys of the layer alone make the pick from the old ones worthless.
    rig.dsa.store_keys(&second, indexed.keys).unwrap();
    assert!(attend(&rig, &first, Some(&of_first)).unwrap_err().to_string().contains("buffers hold none"));
    let of_second = pick(&mut second);
    first.set_layer(1);
    second.set_layer(1);
    let shared = rig.dsa.shared_selection(&first).unwrap();
    assert_eq!(shared, of_first);
    let said = attend(&rig, &first, Some(&shared)).unwrap_err().to_string();
    assert!(said.contains("hold a later one, which another forward made"), "{said}");
    assert_eq!(rig.dsa.shared_selection(&second).unwrap(), of_second);
    attend(&rig, &second, Some(&of_second)).unwrap();
    rig.engine.abort(planned);
}

#[test]
fn tensors_of_another_shape_or_dtype_are_refused_by_name() {
    let rig = rig();
    let planned = rig.planned(step(&[("a", 1)]), None);
    let stream = Stream::cpu();
    let mut forward = planned.forward("main", &stream);
    let floats = [0f32; 2 * HI * DI];
    let view = |shape: &[usize]| TensorRef::from_slice(&floats, shape).unwrap();
    let said = rig.dsa.store_keys(&forward, view(&[2, DI])).unwrap_err().to_string();
    assert!(said.contains("dsa: keys: expected shape [T, Di] = [1, 16]"), "{said}");
    let halves = [half::bf16::ZERO; DI];
    let said = rig.dsa.store_keys(&forward, TensorRef::from_slice(&halves, &[1, DI]).unwrap()).unwrap_err();
    assert!(said.to_string().contains("keys: expected dtype f32 or f32, got bf16"), "{said}");
    rig.dsa.store_keys(&forward, view(&[1, DI])).unwrap();
    let said = rig.dsa.select(&mut forward, view(&[1, HI, DI / 2]), view(&[1, HI])).unwrap_err().to_string();
    assert!(said.contains("q: expected shape [T, Hi, Di] = [1, 4, 16]"), "{said}");
    let said = rig.dsa.select(&mut forward, view(&[1, HI, DI]), view(&[1, HI + 1])).unwrap_err().to_string();
    assert!(said.contains("weights: expected shape [T, Hi] = [1, 4]"), "{said}");
    let selection = rig.dsa.select(&mut forward, view(&[1, HI, DI]), view(&[1, HI])).unwrap();
    let mut few = [0i32; 7];
    let said =
        rig.dsa.copy_selection(&selection, TensorMut::from_slice(&mut few, &[1, 7]).unwrap()).unwrap_err();
    assert!(said.to_string().contains("out: expected shape [T, K] = [1, 8]"), "{said}");
    let heads = TensorRef::from_slice(&floats, &[1, H, C]).unwrap();
    let mut o = [0f32; H * C];
    let out = AttnOut { o: TensorMut::from_slice(&mut o, &[1, H, C]).unwrap(), lse: None };
    let said = rig.dsa.attend(&forward, Some(&selection), Query::Heads(heads), out).unwrap_err().to_string();
    assert!(said.contains("absorbed queries"), "{said}");
    rig.engine.abort(planned);
}

#[test]
fn a_stale_plan_is_refused_and_work_of_it_is_none() {
    let rig = rig();
    let planned = rig.planned(step(&[("a", 1)]), None);
    let id = plan_id(&planned, "main");
    assert!(rig.dsa.needs_selection(&id).unwrap());
    rig.engine.commit(planned).unwrap();
    assert!(matches!(rig.dsa.needs_selection(&id), Err(Error::UnknownPlan { .. })));
    assert!(rig.dsa.kernel(&id).is_none() && rig.dsa.sparse_work(&id).dense == 0);
}

#[test]
fn declarations_that_sparse_attention_cannot_follow_are_refused() {
    let rig = rig();
    let context_only = AttentionStep { context_only: true, ..AttentionStep::default() };
    let said =
        rig.engine.admit(step(&[("a", 1)]).with("dsa", Declaration::Attention(context_only))).unwrap_err();
    assert!(said.to_string().contains("declare nothing for it"), "{said}");
    let plain = Declaration::Attention(AttentionStep::default());
    let planned = rig.planned(step(&[("a", 1)]).with("dsa", plain), None);
    rig.engine.abort(planned);
}

#[test]
fn buffers_refuse_forks_prefix_hits_and_plans_ahead_with_reasons() {
    let setup = Setup { store: IndexStore::Buffers, ..Setup::default() };
    let rig = Rig::new(setup.clone());
    rig.ingest(&["a"]);
    rig.step(&[("a", 5)], None);
    assert!(!rig.dsa.prefix_skip_safe() && !rig.dsa.supports_preplan());
    let fork = || Fork { request: "a".into(), from: "main".into(), to: "side".into() };
    for (pre_forks, post_forks) in [(vec![fork()], vec![]), (vec![], vec![fork()])] {
        let kv =
            KvStep { segments: vec![segment("a", "main", 3)], pre_forks, post_forks, ..KvStep::default() };
        let said = rig.engine.admit(kv_step(kv)).unwrap_err().to_string();
        assert!(said.contains("not forked with their stream; say index_store: pages"), "{said}");
    }
    let cached = Setup { prefix_cache: true, ..setup };
    let kv = Arc::new(PagedKvCache::new("kv".into(), cached.config()).unwrap());
    let dsa = Arc::new(DsaManager::build(&cached.context(Some(kv.clone())), &cached.index()).unwrap());
    let said = Engine::new(vec![kv as Arc<dyn Resource>, dsa]).map(|_| ()).unwrap_err().to_string();
    assert!(said.contains("may not skip the work of dsa"), "{said}");
}

#[test]
fn what_cannot_be_built_says_why() {
    let build = |setup: &Setup, change: &dyn Fn(&mut mstar_core::attend::BuildContext)| {
        let kv = Arc::new(PagedKvCache::new("kv".into(), setup.config()).unwrap());
        let mut cx = setup.context(Some(kv));
        change(&mut cx);
        DsaManager::build(&cx, &setup.index()).map(|_| ()).map_err(|error| error.to_string())
    };
    let setup = Setup::default();
    build(&setup, &|_| {}).unwrap();
    let said = |change: &dyn Fn(&mut mstar_core::attend::BuildContext)| build(&setup, change).unwrap_err();
    assert!(said(&|cx| cx.kv_cache = None).contains("kv_cache: name the cache"));
    if !cfg!(feature = "cuda") {
        assert!(said(&|cx| cx.stream = elsewhere()).contains("without kernels for cuda:0"));
    }
    assert!(said(&|cx| cx.geometry.softmax.window_left = Some(3)).contains("no window_left"));
    assert!(said(&|cx| cx.geometry.softmax.sm_scale = f32::NAN).contains("sm_scale"));
    let nhd = KvLayout::Nhd { num_kv_heads: 1, head_dim: 8 };
    assert!(said(&|cx| cx.geometry.layout = nhd).contains("layout: mla"));
    let refused = |setup: Setup| build(&setup, &|_| {}).unwrap_err();
    assert!(
        refused(Setup { full_layers: vec![1], ..setup.clone() }).contains("full_layers must begin with 0")
    );
    assert!(refused(Setup { topk: 0, ..setup.clone() }).contains("index_topk"));
    // A cache without the plane of index keys.
    let kv = KvConfig { planes: vec![], ..setup.config() };
    let kv = Arc::new(PagedKvCache::new("kv".into(), kv).unwrap());
    let said =
        DsaManager::build(&setup.context(Some(kv)), &setup.index()).map(|_| ()).unwrap_err().to_string();
    assert!(said.contains("dsa.index_keys") && said.contains("index_store: buffers"), "{said}");
}

#[test]
fn what_changes_pages_changes_the_fingerprint() {
    let of = |setup: Setup| {
        let kv = Arc::new(PagedKvCache::new("kv".into(), setup.config()).unwrap());
        DsaManager::build(&setup.context(Some(kv)), &setup.index()).unwrap().fingerprint().unwrap()
    };
    let plain = of(Setup::default());
    for changed in [
        Setup { topk: 9, ..Setup::default() },
        Setup { format: IndexFormat::Fp8, ..Setup::default() },
        Setup { full_layers: vec![0], ..Setup::default() },
        Setup { dtype: DType::Bf16, ..Setup::default() },
    ] {
        assert_ne!(of(changed), plain);
    }
    assert_eq!(of(Setup { store: IndexStore::Buffers, ..Setup::default() }), plain);
}

#[test]
fn the_factory_says_how_well_it_serves_and_how_much_it_takes() {
    let setup = Setup::default();
    let cx = setup.context(None);
    assert_eq!(DsaFactory.supports(Device::Cpu, &cx.geometry, &setup.index()).unwrap(), Rank::PORTABLE);
    let on_a_card = DsaFactory.supports(Device::Cuda(1), &cx.geometry, &setup.index());
    assert_eq!(on_a_card.is_ok(), cfg!(feature = "cuda"));
    assert_eq!(DsaFactory.name(), "dsa");
    // Exactly what a resource of that bound allocates for one label and slot, with and without a selection.
    for (store, kv_len, format) in [
        (IndexStore::Pages, 100, IndexFormat::F32),
        (IndexStore::Pages, 100, IndexFormat::Fp8),
        (IndexStore::Pages, 8, IndexFormat::Fp8),
        (IndexStore::Buffers, 100, IndexFormat::Bf16),
    ] {
        let largest = StepShape { rows: 4, tokens: 24, kv_len };
        let setup = Setup { largest: Some(largest), store, format, ..Setup::default() };
        let said = DsaFactory.bytes(cx.device(), &cx.geometry, &setup.index(), largest).unwrap();
        let rig = Rig::new(Setup { store: IndexStore::Pages, ..setup });
        rig.ingest(&["a", "b"]);
        rig.step(&[("a", kv_len.min(20)), ("b", 4)], None);
        let first = rig.dsa.bytes();
        assert_eq!(first, said);
        if kv_len > 21 {
            rig.step(&[("a", 1)], None);
            assert_eq!(rig.dsa.bytes() % said, 0);
        }
    }
}

/// A stream of a card, which nothing is put into.
fn elsewhere() -> Stream {
    // SAFETY: null is every device's default stream.
    unsafe { Stream::from_raw(Device::Cuda(0), std::ptr::null_mut()) }
}

#[test]
fn a_layer_that_is_replayed_leaves_in_the_cursor_what_selecting_leaves() {
    let rig = rig();
    let stream = Stream::cpu();
    let inputs = Inputs::new(&rig, 1);
    let mut left = Vec::new();
    for replayed in [false, true] {
        let planned = rig.planned(step(&[("a", 1)]), None);
        let mut forward = planned.forward("main", &stream);
        // A shared layer is replayed behind its full one alone.
        forward.set_layer(1);
        let said = rig.dsa.replaying(&mut forward).unwrap_err().to_string();
        assert!(said.contains("the pick of layer 0, which has not selected"), "{said}");
        for layer in [0, 2] {
            forward.set_layer(layer);
            if replayed {
                rig.dsa.replaying(&mut forward).unwrap();
            } else {
                let indexed = inputs.indexed(&rig);
                rig.dsa.store_keys(&forward, indexed.keys).unwrap();
                rig.dsa.select(&mut forward, indexed.q, indexed.weights).unwrap();
            }
            forward.set_layer(layer + 1);
            let shared = rig.dsa.shared_selection(&forward).unwrap();
            rig.dsa.replaying(&mut forward).unwrap();
            left.push((shared.layer(), shared.turn(), shared.plan() == forward.plan_id()));
        }
        // What the buffers hold now is the last pick, and no earlier one.
        let earlier = Selection::new(forward.plan_id().clone(), 0, left[left.len() - 2].1);
        let mut picks = vec![0i32; rig.dsa.index().index_topk];
        let shape = [1, picks.len()];
        let mut copy =
            |of: &Selection| rig.dsa.copy_selection(of, TensorMut::from_slice(&mut picks, &shape).unwrap());
        assert!(copy(&earlier).is_err());
        copy(forward.last_selection().unwrap()).unwrap();
        rig.engine.abort(planned);
    }
    // As many turns as an eager pass takes.
    let turns: Vec<_> = left.iter().map(|(layer, turn, own)| (*layer, turn - left[0].1, *own)).collect();
    assert_eq!(turns, [(0, 0, true), (2, 1, true), (0, 2, true), (2, 3, true)]);
}
