//! Many threads on one store (F31).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use mstar_core::kv::{KvConfig, PagedStore};
use mstar_core::resource::Promotion;
use mstar_core::step::KvStep;
use mstar_core::{Error, Outcome, PlanId, Slot};

use super::harness::*;

const THREADS: u64 = 8;
const OPS: u64 = 10_000;
const REQUESTS: u64 = 6;
const LABELS: [&str; 2] = ["main", "cond"];

/// SplitMix64: a generator of each thread's own.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % n
    }
}

/// The content of a request's streams at a position, whatever its history was.
fn token(request: u64, position: usize) -> u64 {
    request * 500 + position as u64
}

/// Plans, checks what is stored, writes what is new, by the plan alone: the admitted step holds its streams.
fn forward(store: &PagedStore, serial: mstar_core::StepSerial, slot: Slot, step: &mut KvStep) {
    for label in store.plan_labels(serial).unwrap() {
        let plan = store.kv_plan(&PlanId { slot, label, serial }).unwrap();
        let s = store.config().page_size;
        for (r, row) in plan.rows.iter().enumerate() {
            let request: u64 = row.request.as_str().parse().unwrap();
            for position in row.kv_offset + row.page_start..row.kv_len - row.q_len {
                let at = position - row.kv_offset;
                let found = token_at(store, plan.pages(r)[at / s], at % s);
                assert_eq!(found, token(request, position), "request {request} at {position}");
            }
            let of = |s: &&mut mstar_core::Segment| s.request == row.request && s.label == row.label;
            let segment = step.segments.iter_mut().find(of).unwrap();
            segment.tokens = (row.kv_len - row.q_len..row.kv_len).map(|p| token(request, p)).collect();
        }
    }
    write(store, serial, slot, step);
}

/// One step of one or two streams, perhaps with a fork, perhaps undone. `false` when another thread's is running.
fn step_once(store: &PagedStore, rng: &mut Rng, ahead: bool) -> bool {
    let (id, label) = (rng.below(REQUESTS).to_string(), LABELS[rng.below(2) as usize]);
    let mut wanted = step(vec![segment(&id, label, &vec![0; rng.below(30) as usize])]);
    wanted.segments[0].tokens = [].into();
    wanted.commit = rng.below(5) > 0;
    if rng.below(4) == 0 {
        wanted.pre_forks = vec![fork(&id, "main", "cond")];
    }
    let (serial, slot) = (serial(), Slot(usize::from(ahead)));
    match store.admit(serial, slot, ahead, &wanted) {
        Ok(Outcome::Admitted) => {}
        Ok(_) | Err(Error::UnknownRequest { .. } | Error::UnknownStream { .. }) => return true,
        Err(Error::Order { .. }) => return false,
        Err(other) => panic!("{other}"),
    }
    if let Err(error) = store.plan(serial, None) {
        assert!(ahead, "{error}"); // the running step was rolled back, and this one with it
        return true;
    }
    if ahead {
        // Its turn comes when the running step ends, unless that one's rollback takes this one with it.
        loop {
            match store.promote(serial, slot) {
                Ok(Promotion::Valid) => break,
                Ok(Promotion::Stale) => {
                    store.rollback(serial);
                    return true;
                }
                Err(error) if error.to_string().contains("still runs") => thread::yield_now(),
                Err(_) => return true,
            }
        }
    }
    forward(store, serial, slot, &mut wanted);
    if rng.below(6) == 0 {
        store.rollback(serial);
    } else {
        store.commit(serial).unwrap();
    }
    true
}

#[test]
fn f31_eight_threads_on_one_store() {
    let config = KvConfig { max_seq_len: 120, ..config(4, 64) };
    let store = Arc::new(store(config));
    let steps = Arc::new(AtomicU64::new(0));
    let done = Arc::new(AtomicBool::new(false));
    let start = Arc::new(Barrier::new(THREADS as usize));
    let (report, reports) = channel();
    for seed in 0..THREADS {
        let (store, steps, start, report) = (store.clone(), steps.clone(), start.clone(), report.clone());
        thread::spawn(move || {
            let mut rng = Rng(seed);
            start.wait();
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                for _ in 0..OPS {
                    let id = request(&rng.below(REQUESTS).to_string());
                    match rng.below(16) {
                        0 => drop(store.reset(&id, rng.below(2) == 0)),
                        1 => drop(store.remove(&id)),
                        2..4 => drop(store.offload(&id)),
                        4..7 => drop(store.reload(&id)),
                        7..9 => store.ingest(&mstar_core::resource::Ingest::new(id)).unwrap(),
                        9 => drop(store.page_need(&step(vec![segment(id.as_str(), "main", &[0; 9])]))),
                        n => {
                            // Two steps may be outstanding: whoever comes third tries again.
                            for _ in 0..200 {
                                if step_once(&store, &mut rng, n > 13) {
                                    steps.fetch_add(1, Ordering::Relaxed);
                                    break;
                                }
                                thread::yield_now();
                            }
                        }
                    }
                }
            }));
            report.send(outcome.is_ok()).unwrap();
        });
    }
    let walker = {
        let (store, done) = (store.clone(), done.clone());
        thread::spawn(move || {
            while !done.load(Ordering::Relaxed) {
                store.check().unwrap();
                thread::sleep(Duration::from_millis(1));
            }
        })
    };
    for _ in 0..THREADS {
        let fine = reports.recv_timeout(Duration::from_secs(300)).expect("a thread hangs");
        assert!(fine, "a thread panicked");
    }
    done.store(true, Ordering::Relaxed);
    walker.join().unwrap();
    assert!(steps.load(Ordering::Relaxed) > OPS, "only {steps:?} steps ran");
    for id in store.requests() {
        store.remove(&id).unwrap();
    }
    store.check().unwrap();
    assert_eq!(store.stats().pages_free, 64);
}
