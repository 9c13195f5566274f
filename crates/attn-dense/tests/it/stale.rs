//! A prefix that was gathered once is served for as long as its stream stands, and never a moment longer. Every step here is
//! held to the oracle over what its stream holds now (`Rig::finish`), so that a stale gather is a wrong row.

use mstar_attn_dense::{DenseOptions, GatherCounts, PrefixSource};
use mstar_core::attend::StepShape;
use mstar_core::resource::{AttentionOverrides, Outcome, Override};
use mstar_core::step::{Combined, KvStep};
use mstar_core::{Ingest, Resource};

use crate::rig::{Rig, config, declare, denoise, fork, segment, step, written};

fn counts(gathered: u64, extended: u64, kept: u64, tokens: u64) -> GatherCounts {
    GatherCounts { gathered, extended, kept, tokens }
}

/// A rig whose buffers never need to grow.
fn roomy() -> Rig {
    let largest = StepShape { rows: 4, tokens: 64, kv_len: 64 };
    Rig::with(config(4, 64), DenseOptions::default(), Some(largest))
}

/// A request with a prefix of 9 tokens (in pages of 4) that a denoising pass has gathered.
fn gathered() -> Rig {
    let rig = roomy();
    rig.ingest(&["a"]);
    rig.step(written("a", 9), 1);
    rig.step(denoise("a", 6), 2);
    assert_eq!(rig.attn.gather_counts(), counts(1, 0, 0, 9));
    rig
}

#[test]
fn a_prefix_is_gathered_once_for_all_passes() {
    let rig = gathered();
    for pass in 3..10 {
        rig.step(denoise("a", 6), pass);
    }
    assert_eq!(rig.attn.gather_counts(), counts(1, 0, 7, 9));
}

#[test]
fn a_commit_that_lengthens_the_stream_extends_it() {
    let rig = gathered();
    rig.step(written("a", 5), 3);
    rig.step(denoise("a", 6), 4);
    // The writing step attends the prefix as it was; the pass after it gathers the five tokens that came.
    assert_eq!(rig.attn.gather_counts(), counts(1, 1, 1, 9 + 5));
    rig.step(denoise("a", 2), 5);
    assert_eq!(rig.attn.gather_counts(), counts(1, 1, 2, 9 + 5));
}

#[test]
fn a_buffer_that_must_grow_is_gathered_anew() {
    let rig = Rig::new(DenseOptions::default());
    rig.ingest(&["a"]);
    for pass in 1..6 {
        rig.step(written("a", 7), pass);
        rig.step(denoise("a", 3), pass);
    }
}

#[test]
fn a_fork_over_a_stream_drops_what_was_gathered_of_it() {
    let rig = Rig::new(DenseOptions::default());
    rig.ingest(&["a"]);
    rig.step(step(&[("a", "other", 9)], true), 1);
    rig.step(written("a", 9), 2);
    rig.step(denoise("a", 6), 3);
    // `main` becomes another stream's content at the same length: a gather known by name and length would be stale.
    let declared = KvStep {
        segments: vec![segment("a", "main", 6)],
        pre_forks: vec![fork("a", "other", "main")],
        commit: true,
        ..KvStep::default()
    };
    let before = rig.attn.gather_counts();
    rig.step(declare(declared), 4);
    assert_eq!(rig.attn.gather_counts().gathered, before.gathered + 1);
    rig.step(denoise("a", 6), 5);
}

#[test]
fn both_sides_of_a_fork_are_gathered_for_themselves_and_packed_into_one_plan() {
    let rig = Rig::new(DenseOptions::default());
    rig.ingest(&["a", "b"]);
    rig.step(step(&[("a", "main", 7), ("b", "main", 10)], true), 1);
    let combined = vec![Combined { label: "cfg".into(), parts: vec!["cond".into(), "uncond".into()] }];
    let rows = |pre_forks, commit| {
        let mut segments = Vec::new();
        for request in ["a", "b"] {
            segments.extend(["cond", "uncond"].map(|label| segment(request, label, 5)));
        }
        declare(KvStep { segments, pre_forks, commit, combined: combined.clone(), ..KvStep::default() })
    };
    let forks: Vec<_> =
        ["a", "b"].iter().flat_map(|r| ["cond", "uncond"].map(|to| fork(r, "main", to))).collect();
    rig.step(rows(forks, true), 2);
    let before = rig.attn.gather_counts();
    for pass in 3..6 {
        rig.step(rows(vec![], false), pass);
    }
    // The forked streams have grown by what the first step kept, each its own; after that nothing is gathered.
    let after = rig.attn.gather_counts();
    assert_eq!(after.kept - before.kept, 8);
}

#[test]
fn a_reset_drops_it() {
    for free in [false, true] {
        let rig = gathered();
        rig.engine.reset(&"a".into(), free).unwrap();
        rig.stored.borrow_mut().clear();
        assert!(rig.attn.tracked_requests().is_empty());
        rig.step(written("a", 9), 3);
        rig.step(denoise("a", 6), 4);
        assert_eq!(rig.attn.gather_counts(), counts(2, 0, 0, 18));
    }
}

#[test]
fn removing_and_taking_in_again_drop_it() {
    let rig = gathered();
    assert_eq!(rig.attn.tracked_requests(), ["a".into()]);
    rig.engine.remove(&"a".into()).unwrap();
    assert!(rig.attn.tracked_requests().is_empty());
    rig.stored.borrow_mut().clear();
    rig.ingest(&["a"]);
    rig.step(written("a", 9), 3);
    rig.step(denoise("a", 6), 4);
    assert_eq!(rig.attn.gather_counts(), counts(2, 0, 0, 18));
    rig.ingest(&["a"]);
    rig.step(denoise("a", 6), 5);
    assert_eq!(rig.attn.gather_counts(), counts(3, 0, 0, 27));
}

#[test]
fn going_to_the_host_and_back_drops_it() {
    let rig = gathered();
    rig.kv.store().offload(&"a".into()).unwrap();
    // Its old pages are another's by the time it comes back.
    rig.ingest(&["b"]);
    rig.step(written("b", 40), 3);
    assert_eq!(rig.kv.store().reload(&"a".into()).unwrap(), Outcome::Admitted);
    rig.step(denoise("a", 6), 4);
    assert_eq!(rig.attn.gather_counts(), counts(2, 0, 0, 18));
}

#[test]
fn a_page_that_moves_under_a_stream_drops_it() {
    let rig = gathered();
    // The fork shares the partial last page; whoever extends first gets a copy of it, and a generation.
    let declared = KvStep {
        segments: vec![segment("a", "main", 3), segment("a", "twin", 2)],
        pre_forks: vec![fork("a", "main", "twin")],
        commit: true,
        ..KvStep::default()
    };
    rig.step(declare(declared), 3);
    rig.step(step(&[("a", "main", 6), ("a", "twin", 6)], false), 4);
}

#[test]
fn rows_that_come_go_and_change_places_each_have_their_own() {
    let rig = roomy();
    rig.ingest(&["a", "b", "c"]);
    let prefixes = [("a", 9), ("b", 9), ("c", 9)];
    rig.step(step(&prefixes.map(|(request, len)| (request, "main", len)), true), 1);
    for (pass, order) in
        [&["a", "b"][..], &["b", "a"], &["b"], &["c", "b"], &["a", "b", "c"], &["a", "c", "b"]]
            .into_iter()
            .enumerate()
    {
        let rows: Vec<_> = order.iter().map(|request| (*request, "main", 5)).collect();
        rig.step(step(&rows, false), 2 + pass as u64);
    }
    // `b` kept its place once, when `a` came back before it, and `a` once, when `b` and `c` changed behind it.
    assert_eq!(rig.attn.gather_counts().kept, 3);
}

#[test]
fn what_an_undone_step_gathered_is_not_served() {
    let rig = gathered();
    let planned = rig.planned(step(&[("a", "main", 6)], true), None);
    rig.engine.abort(planned);
    rig.step(denoise("a", 6), 3);
    assert_eq!(rig.attn.gather_counts().kept, 2, "what an earlier step gathered stays");
    rig.ingest(&["b"]);
    rig.step(written("b", 6), 4);
    let planned = rig.planned(denoise("b", 2), None);
    rig.engine.abort(planned);
    let before = rig.attn.gather_counts();
    rig.step(denoise("b", 2), 5);
    assert_eq!(rig.attn.gather_counts().gathered, before.gathered + 1);
}

#[test]
fn a_plan_made_ahead_gathers_when_its_turn_has_come() {
    let rig = gathered();
    // The running step writes what the next one's prefix ends with.
    let (running, next) = (written("a", 7), denoise("a", 6));
    let planned = rig.planned(running.clone(), None);
    let ahead = rig.engine.preplan(&planned, next.clone()).unwrap().admitted().unwrap();
    rig.finish(planned, &running, 3);
    let promoted = rig.engine.promote(ahead).map_err(|failed| failed.error).unwrap().admitted().unwrap();
    rig.finish(promoted, &next, 4);
}

#[test]
fn a_plan_made_ahead_of_a_stream_that_was_emptied_serves_nothing_of_the_old_one() {
    let rig = gathered();
    rig.ingest(&["b"]);
    let (running, next) = (written("b", 3), denoise("a", 6));
    let planned = rig.planned(running.clone(), None);
    let ahead = rig.engine.preplan(&planned, next.clone()).unwrap().admitted().unwrap();
    rig.finish(planned, &running, 3);
    rig.engine.clear(ahead);
    rig.engine.reset(&"a".into(), false).unwrap();
    rig.stored.borrow_mut().remove(&("a".into(), "main".into()));
    rig.step(written("a", 9), 4);
    rig.step(next, 5);
}

#[test]
fn keep_prefix_false_gathers_every_time_and_a_request_may_say_otherwise() {
    let rig = Rig::new(DenseOptions { keep_prefix: false, ..DenseOptions::default() });
    rig.ingest(&["a"]);
    let mut other = Ingest::new("b".into());
    let keep = AttentionOverrides { keep_prefix: Some(true) };
    other.overrides.insert("attn".into(), Override::Attention(keep));
    rig.engine.ingest(&other).unwrap();
    assert_eq!(rig.attn.tracked_requests(), ["b".into()]);
    for request in ["a", "b"] {
        rig.step(written(request, 9), 1);
        let before = rig.attn.gather_counts();
        (2..6).for_each(|pass| drop(rig.step(denoise(request, 6), pass)));
        let kept = rig.attn.gather_counts().kept - before.kept;
        assert_eq!(kept, if request == "a" { 0 } else { 3 });
    }
    rig.engine.remove(&"b".into()).unwrap();
    assert!(!rig.attn.tracked_requests().contains(&"b".into()));
}

#[test]
fn read_from_its_pages_a_prefix_has_the_same_bits_and_takes_no_memory() {
    let run = |prefix| {
        let rig = Rig::new(DenseOptions { prefix, causal: false, ..DenseOptions::default() });
        rig.ingest(&["a", "b"]);
        rig.step(step(&[("a", "main", 9), ("b", "main", 21)], true), 1);
        let outs: Vec<_> = (2..5)
            .flat_map(|pass| rig.step(step(&[("b", "main", 6), ("a", "main", 3)], false), pass))
            .flat_map(|row| row.bits())
            .collect();
        (outs, rig.attn.gather_counts())
    };
    let (gathered, counted) = run(PrefixSource::Gathered);
    let (pages, none) = run(PrefixSource::Pages);
    assert!(gathered == pages);
    assert_eq!((counted.gathered, none), (2, GatherCounts::default()));
}
