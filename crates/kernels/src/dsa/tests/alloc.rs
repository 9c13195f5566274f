//! A call allocates nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use super::fixture::{Batch, FORMATS};
use crate::cpu::Isa;
use crate::dsa::{TopkParams, select, topk};
use crate::{Stream, TensorMut, TensorRef};

/// The system's allocator, counting what each thread asks of it.
struct Counting;

thread_local! {
    static ASKED: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has no counter any more.
        let _ = ASKED.try_with(|asked| asked.set(asked.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    // Without this, zeroed memory would be written where the system's is left untouched until it is used.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let _ = ASKED.try_with(|asked| asked.set(asked.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Allocations of this thread during a call.
fn during(call: impl FnOnce()) -> usize {
    let before = ASKED.get();
    call();
    ASKED.get() - before
}

#[test]
fn selecting_allocates_nothing() {
    assert_ne!(during(|| drop(std::hint::black_box(vec![1u8; 64]))), 0, "allocations are counted");
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        for format in FORMATS {
            let mut batch = Batch::random(2, 5, 20, &[(700, 3), (90, 0)]);
            batch.format = format;
            for t in 0..80 {
                batch.row(t % 3 - 1, 40 + t % 50);
            }
            let result = batch.run(|params| {
                let mut result = Ok(());
                let asked = during(|| result = select(&Stream::cpu(), params));
                assert_eq!(asked, 0, "{isa} {format:?}");
                result
            });
            result.unwrap();
        }
        let scores: Vec<f32> = (0..9000).map(|i| (i * 7919 % 3001) as f32).collect();
        let mut out = vec![0; 2000];
        let params = TopkParams {
            scores: TensorRef::from_slice(&scores, &[1, 9000]).unwrap(),
            positions: &[8999],
            topk: 2000,
            out: TensorMut::from_slice(&mut out, &[1, 2000]).unwrap(),
            workers: 1,
        };
        assert_eq!(during(|| topk(&Stream::cpu(), params).unwrap()), 0, "{isa}");
    }
}
