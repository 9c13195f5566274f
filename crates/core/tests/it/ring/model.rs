//! The ring against a model of plain vectors: each frame is the content that was last written to it, or nothing.
//!
//! Random operations run on both. After each: the bookkeeping's own walk passes, every world's every frame holds what
//! the model says, worlds that are nobody's are zero, and what was refused or undone has left no trace.

use std::collections::BTreeMap;

use mstar_core::kv::{RingGeometry, RingKv, WorldSnapshot};
use mstar_core::{Outcome, Refusal, RefusalReason, RequestId, Resource};
use proptest::prelude::*;

use super::harness::*;

const NAMES: [&str; 3] = ["a", "b", "c"];
const WORLDS: usize = 2;

#[derive(Clone, Copy, Debug)]
enum End {
    Commit,
    Abort,
    /// Given up before anything is written.
    AbortEarly,
}

/// Who passes, and whether the frame is kept.
type Passes = Vec<(usize, bool)>;

#[derive(Clone, Debug)]
enum Op {
    Ingest(usize),
    Step(Passes, End),
    /// A second step, planned while the first runs.
    Ahead {
        first: Passes,
        second: Passes,
        end: End,
        clear: bool,
    },
    /// A pass of a frame that is not the next.
    Wrong {
        who: usize,
        off: i64,
        commit: bool,
    },
    Reset {
        who: usize,
        free: bool,
    },
    Remove(usize),
    Save(usize),
    Restore {
        who: usize,
        which: usize,
    },
}

fn passes() -> impl Strategy<Value = Passes> {
    let one = (0..NAMES.len(), prop::bool::weighted(0.7));
    prop::collection::vec(one, 1..4).prop_map(|mut passes| {
        passes.sort_by_key(|&(who, _)| who);
        passes.dedup_by_key(|&mut (who, _)| who);
        passes
    })
}

fn op() -> impl Strategy<Value = Op> {
    let who = 0..NAMES.len();
    let end = prop_oneof![6 => Just(End::Commit), 1 => Just(End::Abort), 1 => Just(End::AbortEarly)];
    prop_oneof![
        2 => who.clone().prop_map(Op::Ingest),
        12 => (passes(), end.clone()).prop_map(|(passes, end)| Op::Step(passes, end)),
        5 => (passes(), passes(), end, prop::bool::weighted(0.2))
            .prop_map(|(first, second, end, clear)| Op::Ahead { first, second, end, clear }),
        2 => (who.clone(), prop_oneof![-3i64..0, 1i64..3], any::<bool>())
            .prop_map(|(who, off, commit)| Op::Wrong { who, off, commit }),
        1 => (who.clone(), any::<bool>()).prop_map(|(who, free)| Op::Reset { who, free }),
        1 => who.clone().prop_map(Op::Remove),
        1 => who.clone().prop_map(Op::Save),
        1 => (who, 0usize..4).prop_map(|(who, which)| Op::Restore { who, which }),
    ]
}

/// One world: for each layer, each frame's content, the scratch last.
type World = Vec<Vec<Option<u64>>>;

#[derive(Clone, Debug, Default, PartialEq)]
struct Known {
    world: Option<usize>,
    clock: u64,
}

/// The model.
struct Plain {
    layers: Vec<RingGeometry>,
    worlds: Vec<World>,
    requests: BTreeMap<usize, Known>,
    next_content: u64,
}

impl Plain {
    fn new(layers: &[RingGeometry]) -> Plain {
        let worlds = vec![Plain::empty(layers); WORLDS];
        Plain { layers: layers.to_vec(), worlds, requests: BTreeMap::new(), next_content: 1 }
    }

    fn empty(layers: &[RingGeometry]) -> World {
        layers.iter().map(|g| vec![None; g.ring_frames + 1]).collect()
    }

    fn free(&self) -> Vec<usize> {
        let held: Vec<usize> = self.requests.values().filter_map(|known| known.world).collect();
        (0..WORLDS).filter(|world| !held.contains(world)).collect()
    }

    /// The passes of those that are here, at their frames once `before` has been kept, each with its own content.
    fn declare(&mut self, passes: &Passes, before: &[Pass<'static>]) -> Vec<Pass<'static>> {
        let mut declared = Vec::new();
        for &(who, commit) in passes {
            let Some(known) = self.requests.get(&who) else { continue };
            let kept = before.iter().filter(|pass| pass.commit && pass.request == NAMES[who]).count();
            self.next_content += 1;
            let frame = known.clock + kept as u64;
            declared.push(Pass { request: NAMES[who], frame, commit, content: self.next_content });
        }
        declared
    }

    /// Who is short of a world, if they all pass.
    fn short(&self, passes: &[Pass<'_>]) -> usize {
        let homeless = passes.iter().filter(|pass| self.requests[&who(pass.request)].world.is_none()).count();
        homeless.saturating_sub(self.free().len())
    }

    fn claim(&mut self, passes: &[Pass<'_>]) {
        for pass in passes {
            let free = self.free();
            let known = self.requests.get_mut(&who(pass.request)).unwrap();
            if known.world.is_none() {
                known.world = Some(free[0]);
            }
        }
    }

    fn write(&mut self, passes: &[Pass<'_>]) {
        for pass in passes {
            let world = self.requests[&who(pass.request)].world.unwrap();
            for layer in &mut self.worlds[world] {
                *layer.last_mut().unwrap() = Some(pass.content);
            }
        }
    }

    fn keep(&mut self, passes: &[Pass<'_>]) {
        for pass in passes.iter().filter(|pass| pass.commit) {
            let known = self.requests.get_mut(&who(pass.request)).unwrap();
            known.clock += 1;
            for (layer, g) in self.worlds[known.world.unwrap()].iter_mut().zip(&self.layers) {
                let dilation = g.pinned_dilation as u64;
                if pass.frame.is_multiple_of(dilation) {
                    layer[(pass.frame / dilation) as usize % g.ring_buckets] = Some(pass.content);
                }
            }
        }
    }

    /// The requests are as they were; scratches stay written, but in worlds that go back.
    fn undo(&mut self, before: BTreeMap<usize, Known>) {
        self.requests = before;
        for world in self.free() {
            self.worlds[world] = Plain::empty(&self.layers);
        }
    }

    /// What a pass should see, by the rule, from what the model knows to be written.
    fn sees(&self, pass: &Pass<'_>, layer: usize) -> Vec<usize> {
        let g = &self.layers[layer];
        let world = self.requests[&who(pass.request)].world.unwrap();
        let dilation = g.pinned_dilation as u64;
        let own =
            pass.frame.is_multiple_of(dilation).then(|| (pass.frame / dilation) as usize % g.ring_buckets);
        let written = (0..g.ring_frames)
            .filter(|&slot| self.worlds[world][layer][slot].is_some() && Some(slot) != own)
            .chain([g.ring_frames]);
        written.map(|frame| world * (g.ring_frames + 1) + frame).collect()
    }
}

fn who(name: &str) -> usize {
    NAMES.iter().position(|&known| known == name).unwrap()
}

fn is_short(refusal: &Refusal, short: usize) -> bool {
    matches!(refusal.reason, RefusalReason::NoWorldFree { worlds_short, .. } if worlds_short == short)
}

/// A ring, its model, and the snapshots taken of both.
struct Pair {
    rig: Rig,
    plain: Plain,
    saved: Vec<(WorldSnapshot, World, u64)>,
}

impl Pair {
    fn new() -> Pair {
        let config = config(WORLDS);
        let plain = Plain::new(&config.layers);
        Pair { rig: Rig::new(config, &[]), plain, saved: Vec::new() }
    }

    /// Admits, plans, looks, and ends a step in both.
    fn step(&mut self, passes: &Passes, end: End) {
        let declared = self.plain.declare(passes, &[]);
        let before = self.plain.requests.clone();
        let short = self.plain.short(&declared);
        let admitted = match self.rig.admit(&declared) {
            Ok(admitted) => admitted,
            Err(refusal) => return assert!(short > 0 && is_short(&refusal, short), "{refusal}"),
        };
        assert_eq!(short, 0);
        self.plain.claim(&declared);
        let planned = self.rig.engine.plan(admitted).unwrap();
        self.look(&planned, &declared);
        if !matches!(end, End::AbortEarly) {
            self.rig.write(&planned, &declared);
            self.plain.write(&declared);
        }
        if matches!(end, End::Commit) {
            self.rig.engine.commit(planned).unwrap();
            self.plain.keep(&declared);
        } else {
            self.rig.engine.abort(planned);
            self.plain.undo(before);
        }
    }

    fn ahead(&mut self, first: &Passes, second: &Passes, end: End, clear: bool) {
        let first = self.plain.declare(first, &[]);
        let second = self.plain.declare(second, &first);
        let before = self.plain.requests.clone();
        if self.plain.short(&first) > 0 {
            return;
        }
        let running = self.rig.plan(&first);
        self.plain.claim(&first);
        let between = self.plain.requests.clone();
        let short = self.plain.short(&second);
        let ahead = self.rig.engine.preplan(&running, step(&second)).unwrap().admitted();
        match &ahead {
            Ok(_) => assert_eq!(short, 0),
            Err(refusal) => assert!(short > 0 && is_short(refusal, short), "{refusal}"),
        }
        if !matches!(end, End::AbortEarly) {
            self.rig.write(&running, &first);
            self.plain.write(&first);
        }
        if !matches!(end, End::Commit) {
            self.rig.engine.abort(running);
            self.plain.undo(before);
            assert!(ahead.map_or(true, |ahead| self.rig.engine.promote(ahead).is_err()));
            return;
        }
        self.rig.engine.commit(running).unwrap();
        self.plain.keep(&first);
        let Ok(ahead) = ahead else { return };
        if clear {
            self.rig.engine.clear(ahead);
            let clocks = self.plain.requests.clone();
            for (who, known) in &mut self.plain.requests {
                *known = Known { world: between[who].world, clock: clocks[who].clock };
            }
            return;
        }
        self.plain.claim(&second);
        let serial = ahead.serial();
        let promoted = self.rig.engine.promote(ahead).unwrap().admitted().unwrap();
        assert_eq!(promoted.serial(), serial, "nothing moved");
        self.look(&promoted, &second);
        self.rig.write(&promoted, &second);
        self.plain.write(&second);
        self.rig.engine.commit(promoted).unwrap();
        self.plain.keep(&second);
    }

    fn look(&self, planned: &mstar_core::PlannedStep, passes: &[Pass<'_>]) {
        if passes.is_empty() {
            return;
        }
        let plan = self.rig.ring.ring_plan(&main(planned)).unwrap();
        for (row, pass) in passes.iter().enumerate() {
            for (layer, &group) in self.rig.ring.groups().of_layer.iter().enumerate() {
                let seen: Vec<usize> = plan.visible(group, row).iter().map(|&block| block as usize).collect();
                assert_eq!(seen, self.plain.sees(pass, layer), "{pass:?} in layer {layer}");
            }
        }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Ingest(who) => {
                self.rig.ingest(NAMES[*who]);
                self.plain.requests.entry(*who).or_default();
            }
            Op::Step(passes, end) => self.step(passes, *end),
            Op::Ahead { first, second, end, clear } => self.ahead(first, second, *end, *clear),
            Op::Wrong { who, off, commit } => {
                let Some(known) = self.plain.requests.get(who) else { return };
                let frame = known.clock.wrapping_add_signed(*off);
                let refusal =
                    self.rig.admit(&[Pass { content: 0, ..pass(NAMES[*who], frame, *commit) }]).unwrap_err();
                let (request, expected) = (RequestId::new(NAMES[*who]), known.clock);
                assert_eq!(refusal.reason, RefusalReason::RingClock { request, expected, got: frame });
            }
            Op::Reset { who, free } => {
                let said = self.rig.engine.reset(&NAMES[*who].into(), *free);
                let Some(known) = self.plain.requests.get_mut(who) else { return assert!(said.is_err()) };
                said.unwrap();
                known.clock = 0;
                if let Some(world) = known.world {
                    self.plain.worlds[world] = Plain::empty(&self.plain.layers);
                }
                if *free {
                    known.world = None;
                }
            }
            Op::Remove(who) => {
                self.rig.engine.remove(&NAMES[*who].into()).unwrap();
                if let Some(world) = self.plain.requests.remove(who).and_then(|known| known.world) {
                    self.plain.worlds[world] = Plain::empty(&self.plain.layers);
                }
            }
            Op::Save(who) => {
                let said = self.rig.ring.snapshot(&NAMES[*who].into());
                match self.plain.requests.get(who) {
                    Some(Known { world: Some(world), clock }) => {
                        self.saved.push((said.unwrap(), self.plain.worlds[*world].clone(), *clock));
                    }
                    _ => assert!(said.is_err()),
                }
            }
            Op::Restore { who, which } => {
                let Some((saved, world, clock)) = self.saved.get(*which) else { return };
                let said = self.rig.ring.restore(&NAMES[*who].into(), saved);
                let free = self.plain.free();
                let Some(known) = self.plain.requests.get_mut(who) else { return assert!(said.is_err()) };
                match known.world.or(free.first().copied()) {
                    None => {
                        assert!(matches!(said.unwrap(), Outcome::Refused(refusal) if is_short(&refusal, 1)))
                    }
                    Some(to) => {
                        assert_eq!(said.unwrap(), Outcome::Admitted);
                        *known = Known { world: Some(to), clock: *clock };
                        self.plain.worlds[to] = world.clone();
                    }
                }
            }
        }
    }

    fn compare(&self) {
        self.rig.ring.check().unwrap();
        assert_eq!(self.rig.engine.outstanding(), 0);
        assert_eq!(self.rig.ring.free_worlds(), self.plain.free().len());
        assert_eq!(self.rig.ring.tracked_requests().len(), self.plain.requests.len());
        for (who, known) in &self.plain.requests {
            let request = RequestId::new(NAMES[*who]);
            assert_eq!(self.rig.ring.clock(&request).unwrap(), known.clock, "{request}");
            assert_eq!(self.rig.ring.world(&request).unwrap(), known.world, "{request}");
        }
        for (world, layers) in self.plain.worlds.iter().enumerate() {
            for (layer, frames) in layers.iter().enumerate() {
                for (frame, &content) in frames.iter().enumerate() {
                    let expected = bits(self.rig.ring.config(), content, layer);
                    let same = self.rig.frame(layer, world, frame) == expected;
                    assert!(same, "world {world}, layer {layer}, frame {frame} should hold {content:?}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn the_ring_behaves_as_plain_vectors_do(ops in prop::collection::vec(op(), 1..40)) {
        let mut pair = Pair::new();
        (0..2).for_each(|who| pair.apply(&Op::Ingest(who)));
        for op in &ops {
            pair.apply(op);
            pair.compare();
        }
    }
}
