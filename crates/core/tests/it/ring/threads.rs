//! Requests that come, go, are emptied, saved and restored while steps run: nothing hangs, nothing is lost, no world is
//! two requests'.

use mstar_core::kv::RingKv;
use mstar_core::resource::Ingest;
use mstar_core::{Admission, Error, RefusalReason, RequestId, Resource};

use super::harness::*;

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// A cheap sequence of numbers, one for each thread.
fn draw(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
fn f31_requests_may_come_and_go_while_steps_run() {
    let rig = Rig::new(config(3), &NAMES);
    std::thread::scope(|scope| {
        for seed in 1..=3u64 {
            let ring = &rig.ring;
            scope.spawn(move || {
                let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
                let mut saved = None;
                for _ in 0..400 {
                    let request = RequestId::new(NAMES[draw(&mut state) as usize % NAMES.len()]);
                    // Whatever a step holds, or another thread moves, is refused; the rest is done whole.
                    let said = match draw(&mut state) % 5 {
                        0 => ring.ingest_request(&Ingest::new(request)),
                        1 => ring.reset_request(&request, draw(&mut state).is_multiple_of(2)),
                        2 => ring.remove_request(&request),
                        3 => ring.snapshot(&request).map(|snapshot| saved = Some(snapshot)),
                        _ => saved.as_ref().map_or(Ok(()), |saved| ring.restore(&request, saved).map(drop)),
                    };
                    assert!(
                        matches!(said, Ok(()) | Err(Error::Order { .. } | Error::UnknownRequest { .. })),
                        "{said:?}"
                    );
                    ring.check().unwrap();
                }
            });
        }
        let mut state = 77;
        for turn in 0..400 {
            let request = NAMES[draw(&mut state) as usize % NAMES.len()];
            let Ok(clock) = rig.ring.clock(&request.into()) else { continue };
            let passes = [Pass { content: turn, ..pass(request, clock, turn % 3 == 0) }];
            let admitted = match rig.engine.admit(step(&passes)) {
                Ok(Admission::Admitted(admitted)) => admitted,
                Ok(Admission::NotReady(refusal) | Admission::Refused(refusal)) => {
                    let known = matches!(
                        refusal.reason,
                        RefusalReason::RingClock { .. }
                            | RefusalReason::NoWorldFree { .. }
                            | RefusalReason::WorldBusy { .. }
                    );
                    assert!(known, "{refusal}");
                    continue;
                }
                Err(error) => {
                    assert!(matches!(error, Error::UnknownRequest { .. }), "{error}");
                    continue;
                }
            };
            let planned = rig.engine.plan(admitted).unwrap();
            rig.write(&planned, &passes);
            // Nobody else may touch the world meanwhile: what was written is what is there.
            let plan = rig.ring.ring_plan(&main(&planned)).unwrap();
            let world = plan.rows[0].world.unwrap();
            assert_eq!(rig.frame(0, world, 4), bits(rig.ring.config(), Some(turn), 0));
            rig.engine.commit(planned).unwrap();
        }
    });
    rig.ring.check().unwrap();
    NAMES.iter().for_each(|name| rig.ring.remove_request(&RequestId::new(*name)).unwrap());
    assert_eq!((rig.ring.free_worlds(), rig.ring.tracked_requests().len()), (3, 0));
    assert!((0..3).all(|world| rig.world(world).iter().flatten().all(|&bits| bits == 0)));
}
