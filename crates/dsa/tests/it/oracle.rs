//! Random steps, each query's pick and each row's attention held against the oracle.

use mstar_core::attend::{IndexFormat, IndexStore};
use mstar_core::step::{Fork, KvStep};
use mstar_kernels::DType;
use mstar_kernels::cpu::Isa;

use crate::rig::{Rig, Setup, kv_step, segment};

/// A small generator: the steps are the same on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = mstar_kernels::synth::chain(self.0, 1);
        (self.0 % n as u64) as usize
    }

    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }
}

const REQUESTS: [&str; 4] = ["a", "b", "c", "d"];

/// Steps of prefill chunks, decode rows, drafts, reads and forks, some aborted, some not kept, a request emptied now and
/// then. Every row of every step is checked.
fn walk(setup: Setup, seed: u64, steps: usize) {
    let rig = Rig::new(setup.clone());
    let mut random = Random(seed);
    rig.ingest(&REQUESTS);
    let mut checked = 0;
    for _ in 0..steps {
        let mut kv = KvStep::default();
        for request in REQUESTS {
            let span = random.of(&[1, 1, 1, 2, 5, 13, 30]);
            if random.below(3) > 0 {
                kv.segments.push(segment(request, "main", span));
            }
        }
        if kv.segments.is_empty() {
            continue;
        }
        let request = kv.segments[0].request.clone();
        let stored = rig.kv.store().stream(&request, &"main".into()).is_ok();
        if setup.store == IndexStore::Pages && stored && random.below(4) == 0 {
            kv.pre_forks.push(Fork { request: request.clone(), from: "main".into(), to: "side".into() });
            rig.forked(request.as_str(), "main", "side");
            kv.segments.push(segment(request.as_str(), "side", random.of(&[1, 3])));
        }
        kv.commit = random.below(5) > 0;
        let planned = rig.planned(kv_step(kv), None);
        let labels: &[&str] = if planned.step().kv(&"kv".into()).unwrap().pre_forks.is_empty() {
            &["main"]
        } else {
            &["main", "side"]
        };
        for label in labels {
            for row in rig.forward(&planned, label) {
                rig.check(&row);
                checked += row.q_len;
            }
        }
        match random.below(5) {
            0 => rig.engine.abort(planned),
            _ => rig.engine.commit(planned).unwrap(),
        }
        if random.below(9) == 0 {
            let request = random.of(&REQUESTS);
            rig.engine.reset(&request.into(), random.below(2) == 0).unwrap();
            rig.emptied(request);
        }
    }
    assert!(checked > 4 * steps);
    rig.kv.store().check().unwrap();
}

#[test]
fn random_steps_agree_with_the_oracle() {
    for (seed, page_size) in [(1, 4), (2, 1), (3, 16), (4, 5)] {
        walk(Setup { page_size, pages: 1600 / page_size, ..Setup::default() }, seed, 14);
    }
}

#[test]
fn keys_in_buffers_agree_with_the_oracle() {
    walk(Setup { store: IndexStore::Buffers, ..Setup::default() }, 5, 14);
}

#[test]
fn every_format_of_keys_agrees_with_the_oracle() {
    for format in [IndexFormat::Bf16, IndexFormat::F16, IndexFormat::Fp8] {
        for store in [IndexStore::Pages, IndexStore::Buffers] {
            walk(Setup { format, store, ..Setup::default() }, 6, 6);
        }
    }
    walk(Setup { dtype: DType::Bf16, format: IndexFormat::Bf16, ..Setup::default() }, 7, 8);
    walk(Setup { dtype: DType::Bf16, format: IndexFormat::Fp8, ..Setup::default() }, 8, 8);
}

#[test]
fn every_layer_may_select_and_only_the_first_may() {
    walk(Setup { full_layers: vec![0], ..Setup::default() }, 9, 6);
    walk(Setup { full_layers: vec![0, 1, 2, 3], topk: 1, ..Setup::default() }, 10, 6);
    walk(Setup { full_layers: vec![0, 3], topk: 33, ..Setup::default() }, 11, 8);
}

#[test]
fn every_instruction_set_agrees_with_the_oracle() {
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        walk(Setup::default(), 12, 3);
        walk(Setup { dtype: DType::Bf16, format: IndexFormat::Bf16, ..Setup::default() }, 13, 3);
    }
}
