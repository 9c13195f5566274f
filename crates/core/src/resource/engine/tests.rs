use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::*;
use crate::attend::Event;
use crate::resource::{Fingerprint, Ingest, KvOverrides, Override, PaddedShape};
use crate::{Refusal, RefusalReason, RequestId};

/// What a mock does when it is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Answer {
    #[default]
    Yes,
    NotReady,
    Refused,
    Error,
    Panic,
}

#[derive(Debug, Default, Clone, PartialEq)]
struct State {
    requests: BTreeSet<RequestId>,
    /// What each outstanding step has reserved: a counter that rollback must restore.
    reserved: BTreeMap<StepSerial, usize>,
    planned: BTreeSet<StepSerial>,
    committed: usize,
}

#[derive(Debug)]
struct Mock {
    name: ResourceName,
    needs: Vec<ResourceName>,
    journal: Arc<Mutex<Vec<String>>>,
    state: Mutex<State>,
    admit: Mutex<Answer>,
    plan: Mutex<Answer>,
    ingest: Mutex<Answer>,
    promotion: Mutex<Promotion>,
    preplans: bool,
    hazard: bool,
}

impl Mock {
    fn new(name: &str, needs: &[&str], journal: &Arc<Mutex<Vec<String>>>) -> Mock {
        Mock {
            name: name.into(),
            needs: needs.iter().map(|n| (*n).into()).collect(),
            journal: Arc::clone(journal),
            state: Mutex::default(),
            admit: Mutex::default(),
            plan: Mutex::default(),
            ingest: Mutex::default(),
            promotion: Mutex::new(Promotion::Valid),
            preplans: true,
            hazard: false,
        }
    }

    fn note(&self, what: &str) {
        self.journal.lock().unwrap().push(format!("{} {what}", self.name));
    }

    fn snapshot(&self) -> State {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn fail(&self) -> Error {
        Error::Step { resource: self.name.clone(), why: "told to".into() }
    }
}

impl Resource for Mock {
    fn name(&self) -> &ResourceName {
        &self.name
    }

    fn depends_on(&self) -> Vec<ResourceName> {
        self.needs.clone()
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        None
    }

    fn prefix_skip_safe(&self) -> bool {
        self.name.as_str() != "attn"
    }

    fn bind(
        &self,
        others: &[(ResourceName, Option<Fingerprint>)],
        unskippable: &[ResourceName],
    ) -> Result<()> {
        self.note(&format!("bind {} {}", others.len(), unskippable.is_empty()));
        Ok(())
    }

    fn takes_override(&self, wanted: &Override) -> bool {
        matches!(wanted, Override::Kv(_))
    }

    fn ingest_request(&self, ingest: &Ingest) -> Result<()> {
        if *self.ingest.lock().unwrap() == Answer::Error {
            return Err(self.fail());
        }
        self.state.lock().unwrap().requests.insert(ingest.request.clone());
        Ok(())
    }

    fn admit(&self, cx: &StepContext, _: &Step) -> Result<Outcome> {
        self.note(if cx.preplan { "admit ahead" } else { "admit" });
        let reason = RefusalReason::NoBucket { rows: 1, tokens: 1 };
        let refusal = Refusal { resource: self.name.clone(), reason };
        match *self.admit.lock().unwrap() {
            Answer::Yes => {
                self.state.lock().unwrap().reserved.insert(cx.serial, 1);
                Ok(Outcome::Admitted)
            }
            Answer::NotReady => Ok(Outcome::NotReady(refusal)),
            Answer::Refused => Ok(Outcome::Refused(refusal)),
            Answer::Error => Err(self.fail()),
            Answer::Panic => panic!("a resource that panics"),
        }
    }

    fn rollback(&self, serial: StepSerial) {
        self.note("rollback");
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.reserved.remove(&serial);
        state.planned.remove(&serial);
    }

    fn plan(&self, cx: &StepContext, _: &Step) -> Result<()> {
        self.note("plan");
        if *self.plan.lock().unwrap() == Answer::Error {
            return Err(self.fail());
        }
        self.state.lock().unwrap().planned.insert(cx.serial);
        Ok(())
    }

    fn promote(&self, cx: &StepContext, _: &Step) -> Result<Promotion> {
        self.note("promote");
        assert!(!cx.preplan);
        Ok(*self.promotion.lock().unwrap())
    }

    fn commit(&self, serial: StepSerial, _: &Step) -> Result<()> {
        self.note("commit");
        let mut state = self.state.lock().unwrap();
        assert!(state.planned.remove(&serial), "{}: commit of a step that was not planned", self.name);
        state.reserved.remove(&serial).expect("reserved");
        state.committed += 1;
        Ok(())
    }

    fn reset_request(&self, _: &RequestId, free: bool) -> Result<()> {
        self.note(if free { "reset free" } else { "reset" });
        Ok(())
    }

    fn remove_request(&self, request: &RequestId) -> Result<()> {
        self.note("remove");
        self.state.lock().unwrap().requests.remove(request);
        Ok(())
    }

    fn supports_preplan(&self) -> bool {
        self.preplans
    }

    fn force_double_buffer(&self) -> bool {
        self.hazard
    }

    fn tracked_requests(&self) -> Vec<RequestId> {
        self.snapshot().requests.into_iter().collect()
    }
}

struct World {
    engine: Engine,
    mocks: Vec<Arc<Mock>>,
    journal: Arc<Mutex<Vec<String>>>,
}

impl World {
    /// `dsa` needs `attn`, which needs `kv`; given in the wrong order.
    fn new(options: EngineOptions, adjust: impl Fn(&mut Mock)) -> World {
        let journal = Arc::new(Mutex::new(Vec::new()));
        let named = [("dsa", &["attn", "kv"][..]), ("attn", &["kv"][..]), ("kv", &[][..])];
        let mut mocks: Vec<Arc<Mock>> = named
            .iter()
            .map(|(name, needs)| {
                let mut mock = Mock::new(name, needs, &journal);
                adjust(&mut mock);
                Arc::new(mock)
            })
            .collect();
        let resources = mocks.iter().map(|m| Arc::clone(m) as Arc<dyn Resource>).collect();
        let engine = Engine::with_options(resources, options).unwrap();
        mocks.reverse();
        World { engine, mocks, journal }
    }

    fn plain() -> World {
        let world = World::new(EngineOptions::default(), |_| ());
        let bound = world.said();
        assert_eq!(
            bound,
            ["kv bind 2 false", "attn bind 2 true", "dsa bind 2 false"],
            "each is told of the others"
        );
        world
    }

    fn planned(&self) -> PlannedStep {
        let admitted = self.engine.admit(Step::new("decode")).unwrap().admitted().unwrap();
        self.engine.plan(admitted).unwrap()
    }

    fn ahead(&self, running: &PlannedStep) -> PreplannedStep {
        self.engine.preplan(running, Step::new("decode")).unwrap().admitted().unwrap()
    }

    fn said(&self) -> Vec<String> {
        std::mem::take(&mut self.journal.lock().unwrap())
    }

    fn reserved(&self) -> Vec<usize> {
        self.mocks.iter().map(|m| m.snapshot().reserved.len()).collect()
    }
}

#[test]
fn a_step_visits_resources_in_dependency_order() {
    let world = World::plain();
    let names: Vec<&str> = world.engine.resources().iter().map(|r| r.name().as_str()).collect();
    assert_eq!(names, ["kv", "attn", "dsa"]);
    let planned = world.planned();
    assert_eq!((world.engine.outstanding(), planned.slot()), (1, Slot(0)));
    world.engine.commit(planned).unwrap();
    let want =
        ["admit", "plan", "commit"].iter().flat_map(|c| ["kv", "attn", "dsa"].map(|n| format!("{n} {c}")));
    assert_eq!(world.said(), want.collect::<Vec<_>>());
    assert_eq!((world.engine.outstanding(), world.reserved()), (0, vec![0, 0, 0]));
}

#[test]
fn a_refusal_by_a_later_resource_rolls_back_exactly_the_earlier_ones() {
    for answer in [Answer::NotReady, Answer::Refused, Answer::Error] {
        let world = World::plain();
        let before: Vec<State> = world.mocks.iter().map(|m| m.snapshot()).collect();
        *world.mocks[2].admit.lock().unwrap() = answer;
        match (world.engine.admit(Step::new("decode")), answer) {
            (Ok(Admission::NotReady(r)), Answer::NotReady) | (Ok(Admission::Refused(r)), Answer::Refused) => {
                assert_eq!(r.resource.as_str(), "dsa", "the resource that refused is named");
            }
            (Err(Error::Step { .. }), Answer::Error) => {}
            (other, _) => panic!("{answer:?} became {other:?}"),
        }
        let want = ["kv admit", "attn admit", "dsa admit", "attn rollback", "kv rollback"];
        assert_eq!(world.said(), want, "{answer:?}");
        assert_eq!(world.mocks.iter().map(|m| m.snapshot()).collect::<Vec<_>>(), before);
        assert_eq!(world.engine.outstanding(), 0);
        *world.mocks[2].admit.lock().unwrap() = Answer::Yes;
        world.engine.commit(world.planned()).unwrap();
    }
}

#[test]
fn a_plan_that_fails_gives_the_step_back_unreserved() {
    let world = World::plain();
    *world.mocks[1].plan.lock().unwrap() = Answer::Error;
    let admitted = world.engine.admit(Step::new("mixed")).unwrap().admitted().unwrap();
    let failed = world.engine.plan(admitted).unwrap_err();
    assert!(matches!(failed.error, Error::Step { .. }));
    assert_eq!(failed.step.walk, "mixed");
    drop(failed);
    assert_eq!((world.engine.outstanding(), world.reserved()), (0, vec![0, 0, 0]));
    *world.mocks[1].plan.lock().unwrap() = Answer::Yes;
    world.engine.commit(world.planned()).unwrap();
}

#[test]
fn aborted_and_dropped_tokens_leave_nothing_behind() {
    let world = World::plain();
    let admitted = world.engine.admit(Step::new("decode")).unwrap().admitted().unwrap();
    world.engine.abort(admitted);
    drop(world.planned());
    world.engine.abort(world.planned());
    assert_eq!((world.engine.outstanding(), world.reserved()), (0, vec![0, 0, 0]));
    assert!(world.mocks.iter().all(|m| m.snapshot().planned.is_empty()));
}

#[test]
fn a_panic_in_a_resource_rolls_back_what_was_reserved() {
    let world = World::plain();
    *world.mocks[1].admit.lock().unwrap() = Answer::Panic;
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        drop(world.engine.admit(Step::new("decode")));
    }));
    assert!(caught.is_err());
    assert_eq!((world.engine.outstanding(), world.reserved()), (0, vec![0, 0, 0]));
}

#[test]
fn two_steps_at_most_are_outstanding() {
    let world = World::plain();
    let running = world.planned();
    assert!(
        matches!(world.engine.admit(Step::new("decode")), Err(Error::Order { .. })),
        "preplan it instead"
    );
    let ahead = world.ahead(&running);
    assert_eq!((running.slot(), ahead.slot()), (Slot(0), Slot(1)), "a preplan uses another slot");
    assert!(
        matches!(world.engine.preplan(&running, Step::new("decode")), Err(Error::Order { .. })),
        "a third"
    );
    assert_eq!((world.engine.outstanding(), world.reserved()), (2, vec![2, 2, 2]));

    let failed = world.engine.promote(ahead).unwrap_err();
    let ahead = failed.step.expect("the token comes back while the step before it is outstanding");
    world.engine.commit(running).unwrap();
    assert!(
        matches!(world.engine.admit(Step::new("decode")), Err(Error::Order { .. })),
        "promote or clear first"
    );
    let now = world.engine.promote(ahead).unwrap().admitted().unwrap();
    let next = world.ahead(&now);
    assert_eq!(next.slot(), Slot(0), "slots alternate");
    world.engine.commit(now).unwrap();
    world.engine.clear(next);
    assert_eq!((world.engine.outstanding(), world.reserved()), (0, vec![0, 0, 0]));
}

#[test]
fn a_valid_preplan_is_promoted_without_planning_again() {
    let world = World::plain();
    let running = world.planned();
    let ahead = world.ahead(&running);
    let serial = ahead.serial();
    world.engine.commit(running).unwrap();
    world.said();
    let now = world.engine.promote(ahead).unwrap().admitted().unwrap();
    assert_eq!(now.serial(), serial);
    assert_eq!(world.said(), ["kv promote", "attn promote", "dsa promote"]);
    world.engine.commit(now).unwrap();
    assert!(world.mocks.iter().all(|m| m.snapshot().committed == 2));
}

#[test]
fn a_stale_preplan_is_undone_and_planned_afresh() {
    let world = World::plain();
    let running = world.planned();
    let ahead = world.ahead(&running);
    let stale = ahead.serial();
    world.engine.commit(running).unwrap();
    *world.mocks[0].promotion.lock().unwrap() = Promotion::Stale;
    world.said();
    let now = world.engine.promote(ahead).unwrap().admitted().unwrap();
    assert!(now.serial() > stale, "a serial is never used twice");
    let said = world.said();
    let mut want: Vec<String> = Vec::new();
    for (call, order) in [
        ("promote", ["kv", "attn", "dsa"]),
        ("rollback", ["dsa", "attn", "kv"]),
        ("admit", ["kv", "attn", "dsa"]),
        ("plan", ["kv", "attn", "dsa"]),
    ] {
        want.extend(order.map(|name| format!("{name} {call}")));
    }
    assert_eq!(said, want);
    world.engine.commit(now).unwrap();
    assert_eq!(world.reserved(), [0, 0, 0]);
}

#[test]
fn a_stale_preplan_may_be_refused_like_any_step() {
    let world = World::plain();
    let running = world.planned();
    let ahead = world.ahead(&running);
    world.engine.commit(running).unwrap();
    *world.mocks[2].promotion.lock().unwrap() = Promotion::Stale;
    *world.mocks[1].admit.lock().unwrap() = Answer::Refused;
    assert!(matches!(world.engine.promote(ahead), Ok(Admission::Refused(_))));
    assert_eq!((world.engine.outstanding(), world.reserved()), (0, vec![0, 0, 0]));
}

#[test]
fn aborting_a_step_clears_the_one_planned_on_top_of_it_first() {
    let world = World::plain();
    let running = world.planned();
    let ahead = world.ahead(&running);
    world.said();
    world.engine.abort(running);
    let twice = ["dsa rollback", "attn rollback", "kv rollback"].repeat(2);
    assert_eq!(world.said(), twice);
    let failed = world.engine.promote(ahead).unwrap_err();
    assert!(failed.step.is_none() && matches!(failed.error, Error::Order { .. }));
    assert_eq!((world.engine.outstanding(), world.reserved()), (0, vec![0, 0, 0]));
}

#[test]
fn preplanning_is_refused_where_a_resource_cannot() {
    let world = World::new(EngineOptions::default(), |mock| mock.preplans = mock.name.as_str() != "attn");
    assert!(!world.engine.supports_preplan());
    let running = world.planned();
    let said = world.engine.preplan(&running, Step::new("decode")).unwrap_err().to_string();
    assert!(said.contains("attn does not support it"), "{said}");
    assert_eq!(world.reserved(), [1, 1, 1]);
    world.engine.commit(running).unwrap();
}

#[test]
fn tokens_of_another_engine_are_refused_and_still_end() {
    let (a, b) = (World::plain(), World::plain());
    assert!(matches!(b.engine.commit(a.planned()), Err(Error::Order { .. })));
    let admitted = a.engine.admit(Step::new("decode")).unwrap().admitted().unwrap();
    assert!(b.engine.plan(admitted).is_err());
    let running = a.planned();
    assert!(b.engine.preplan(&running, Step::new("decode")).is_err());
    drop(running);
    assert_eq!((a.engine.outstanding(), a.reserved()), (0, vec![0, 0, 0]));
}

#[test]
fn a_step_that_names_no_resource_of_the_engine_is_refused() {
    let step = Step::new("decode").with("kw", crate::step::Declaration::Attention(Default::default()));
    let said = World::plain().engine.admit(step).unwrap_err().to_string();
    assert_eq!(said, "no resource is called kw; there are: kv, attn, dsa");
}

#[test]
fn ingest_is_idempotent_and_all_or_nothing() {
    let world = World::plain();
    let a = Ingest::new("a".into());
    world.engine.ingest(&a).unwrap();
    world.engine.ingest(&a).unwrap();
    *world.mocks[2].ingest.lock().unwrap() = Answer::Error;
    assert!(world.engine.ingest(&Ingest::new("b".into())).is_err());
    assert!(world.engine.ingest(&a).is_err());
    for mock in &world.mocks {
        assert_eq!(mock.tracked_requests(), ["a".into()], "b is gone everywhere, a is kept");
    }
    world.engine.reset(&"a".into(), true).unwrap();
    world.engine.remove(&"a".into()).unwrap();
    world.engine.remove(&"a".into()).unwrap();
    assert!(world.mocks.iter().all(|m| m.tracked_requests().is_empty()));
}

#[test]
fn a_request_is_removed_everywhere_or_nowhere() {
    use crate::step::{AttentionStep, Declaration, KvStep};
    let world = World::plain();
    world.engine.ingest(&Ingest::new("a".into())).unwrap();
    world.engine.ingest(&Ingest::new("b".into())).unwrap();
    let segment = |request: &str| crate::Segment {
        request: request.into(),
        label: crate::Label::main(),
        span: 1,
        tokens: [].into(),
    };
    let kv = Declaration::Kv(KvStep { segments: vec![segment("a")], ..KvStep::default() });
    let queries = AttentionStep { queries: Some(vec![segment("a")]), ..AttentionStep::default() };
    for (name, part) in [("kv", kv), ("attn", Declaration::Attention(queries))] {
        let step = world.engine.admit(Step::new("decode").with(name, part)).unwrap().admitted().unwrap();
        let said = world.engine.remove(&"a".into()).unwrap_err().to_string();
        assert!(said.contains("names request a"), "{said}");
        assert!(world.mocks.iter().all(|m| m.tracked_requests().contains(&"a".into())));
        world.engine.abort(step);
    }
    let other = world.planned();
    world.engine.remove(&"b".into()).unwrap();
    world.engine.commit(other).unwrap();
    world.engine.remove(&"a".into()).unwrap();
    assert!(world.mocks.iter().all(|m| m.tracked_requests().is_empty()));
}

#[test]
fn overrides_reach_their_resource_or_are_refused() {
    let world = World::plain();
    let mut ingest = Ingest::new("a".into());
    let kv = KvOverrides { max_seq_len: Some(64), prefix_cache: Some(false) };
    ingest.overrides.insert("kv".into(), Override::Kv(kv.clone()));
    world.engine.ingest(&ingest).unwrap();
    assert_eq!(
        (ingest.kv_overrides(&"kv".into()), ingest.kv_overrides(&"attn".into())),
        (kv, Default::default())
    );
    ingest.overrides.insert("attn".into(), Override::Attention(Default::default()));
    assert!(matches!(world.engine.ingest(&ingest), Err(Error::Step { .. })), "a kind that it does not take");
    ingest.overrides = [("nobody".into(), Override::Kv(Default::default()))].into();
    assert!(matches!(world.engine.ingest(&ingest), Err(Error::UnknownResource { .. })));
}

#[test]
fn post_warmup_validate_names_the_dummies_left() {
    let world = World::plain();
    world.engine.ingest(&Ingest::new("a".into())).unwrap();
    assert!(
        world.engine.ingest(&Ingest::new(RequestId::dummy(0))).is_err(),
        "users may not use the namespace"
    );
    let dummies = world.engine.ingest_dummies(3).unwrap();
    world.engine.remove(&dummies[0]).unwrap();
    world.engine.remove(&dummies[2]).unwrap();
    match world.engine.post_warmup_validate() {
        Err(Error::DummyRequestsLeft { resource, requests }) => {
            assert_eq!((resource.as_str(), requests), ("kv", vec![dummies[1].clone()]));
        }
        other => panic!("{other:?}"),
    }
    world.engine.remove(&dummies[1]).unwrap();
    world.engine.post_warmup_validate().unwrap();
}

#[derive(Default)]
struct CountingFence(Mutex<Vec<Slot>>);

impl Fence for CountingFence {
    fn wait(&self, slot: Slot) -> Result<()> {
        self.0.lock().unwrap().push(slot);
        Ok(())
    }
}

#[test]
fn f19_a_slot_is_fenced_before_it_is_planned_again_unless_preplans_alternate() {
    let run = |hazard: bool, preplan: bool| {
        let fence = Arc::new(CountingFence::default());
        let options =
            EngineOptions { preplan, fence: Arc::clone(&fence) as Arc<dyn Fence>, ..Default::default() };
        let world = World::new(options, |mock| mock.hazard = hazard && mock.name.as_str() == "attn");
        for _ in 0..3 {
            world.engine.commit(world.planned()).unwrap();
        }
        fence.0.lock().unwrap().clone()
    };
    assert_eq!(run(true, false), [Slot(0), Slot(0)], "not before the first use");
    assert!(run(false, false).is_empty());
    assert!(run(true, true).is_empty());
}

#[test]
fn a_lease_is_held_by_the_step_and_given_back_with_it() {
    let world = World::plain();
    let bucket = Bucket { walk: "decode".into(), shape: PaddedShape { rows: 8, tokens: 8 } };
    let admitted = world.engine.admit_in(Step::new("decode"), &bucket).unwrap().admitted().unwrap();
    let running = world.engine.plan(admitted).unwrap();
    assert_eq!(running.lease().unwrap().slot(), Slot(0));
    let ahead = world.engine.preplan_in(&running, Step::new("decode"), &bucket).unwrap().admitted().unwrap();
    assert_eq!(ahead.lease().unwrap().slot(), Slot(1));
    drop(running);
    drop(ahead);
    let again = world.engine.admit_in(Step::new("decode"), &bucket).unwrap().admitted().unwrap();
    assert_eq!(again.lease().unwrap().to_string(), "decode [8 rows, 8 tokens] in slot 0");
}

#[derive(Default)]
struct Log(Mutex<Vec<(Phase, String)>>);

impl Observer for Log {
    fn record(&self, event: &Event<'_>) {
        assert!(event.elapsed < Duration::from_secs(60));
        self.0.lock().unwrap().push((event.phase, event.resource.to_string()));
    }
}

#[test]
fn an_observer_hears_every_phase_of_every_resource() {
    let log = Arc::new(Log::default());
    let observer = Some(Arc::clone(&log) as Arc<dyn Observer>);
    let world = World::new(EngineOptions { observer, ..Default::default() }, |_| ());
    world.engine.commit(world.planned()).unwrap();
    let heard = log.0.lock().unwrap();
    for phase in [Phase::Admit, Phase::Plan, Phase::Commit] {
        let by: Vec<_> = heard.iter().filter(|(p, _)| *p == phase).map(|(_, name)| name.as_str()).collect();
        assert_eq!(by, ["kv", "attn", "dsa"], "{phase}");
    }
}

#[test]
fn options_that_cannot_be_are_refused() {
    for (slots, preplan) in [(0, false), (0, true), (1, true)] {
        let options = EngineOptions { slots, preplan, ..Default::default() };
        assert!(Engine::with_options(vec![], options).is_err(), "{slots} {preplan}");
    }
    assert!(
        Engine::with_options(vec![], EngineOptions { slots: 1, preplan: false, ..Default::default() })
            .is_ok()
    );
}
