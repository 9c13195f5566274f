//! Runs, and plans made again, allocate nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use half::bf16;
use mstar_attn_mla::{
    Inputs, Outputs, Plan, PlanOptions, Planned, Stream, TensorMut, TensorRef, Workspace, run,
};

use crate::harness::{Batch, Shape, causal, row};

struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

pub(crate) fn allocations(work: impl FnOnce()) -> usize {
    let before = COUNT.get();
    work();
    COUNT.get() - before
}

#[test]
fn runs_and_plans_made_again_allocate_nothing() {
    let shape = Shape { h: 16, c: 64, e: 16, s: 16 };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| {
        let rows = [row(1, 900), row(1, 5000), row(60, 300), row(3, 70)];
        let batch = Batch::<bf16>::of(shape, causal(shape), &rows);
        let mut later = batch.clone();
        later.kv_last_page_len[0] += 1;
        // Several workers on one thread: the same joins and scratch as on many, all counted here.
        let options = PlanOptions { workers: 4, ..PlanOptions::default() };
        let mut plan = batch.plan(&options);
        let mut workspace = Workspace::for_plan(&plan).unwrap();
        assert_eq!(batch.run_allocations(&plan, &mut workspace), 0);
        let replan = |plan: &mut Plan, batch: &Batch<bf16>| {
            let (geometry, table) = (batch.geometry(), batch.table());
            let mut what = None;
            let count = allocations(|| what = plan.replan(&geometry, &batch.variant, &table, &options).ok());
            (what, count)
        };
        assert_eq!(replan(&mut plan, &later).0, Some(Planned::Changed));
        assert_eq!(replan(&mut plan, &batch), (Some(Planned::Changed), 0));
        assert_eq!(replan(&mut plan, &batch), (Some(Planned::Unchanged), 0));
    });
}

impl Batch<bf16> {
    /// Allocations of a run, after one to warm up.
    fn run_allocations(&self, plan: &Plan, workspace: &mut Workspace) -> usize {
        let Shape { h, c, e, s } = self.shape;
        let t = plan.num_tokens();
        let (mut o, mut lse) = (vec![bf16::ZERO; t * h * c], vec![0f32; t * h]);
        let mut count = 0;
        for _ in 0..2 {
            count = allocations(|| {
                let inputs = Inputs {
                    q_nope: TensorRef::from_slice(&self.q_nope, &[t, h, c]).unwrap(),
                    q_pe: TensorRef::from_slice(&self.q_pe, &[t, h, e]).unwrap(),
                    latent: TensorRef::from_slice(&self.latent, &[self.num_pages, s, c + e]).unwrap(),
                };
                let outputs = Outputs {
                    o: TensorMut::from_slice(&mut o, &[t, h, c]).unwrap(),
                    lse: Some(TensorMut::from_slice(&mut lse, &[t, h]).unwrap()),
                };
                run(plan, &Stream::cpu(), workspace, inputs, outputs).unwrap();
            });
        }
        count
    }
}
