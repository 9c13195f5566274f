//! A planned layer allocates nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use mstar_attn_flex::{FlexOptions, KernelOptions, Stream, TensorMut, TensorRef};
use mstar_core::attend::Softmax;
use mstar_core::kv::{KvEntries, RingGeometry};
use mstar_core::{AttnOut, Query, attend};

use crate::rig::*;

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

#[test]
fn a_layer_of_a_planned_pass_allocates_nothing() {
    // Several workers on one thread: all that they do is counted here.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    mstar_kernels::cpu::Isa::current(); // asked of the machine once a process
    pool.install(|| {
        let options = FlexOptions {
            kernel_options: KernelOptions { workers: 4, ..KernelOptions::default() },
            ..FlexOptions::default()
        };
        let rig = Rig::new(config(vec![RingGeometry::last(2)], 1), Softmax::scaled(0.6), options);
        for frame in 0..4 {
            let pass = Pass { world: 0, frame, commit: true, content: frame };
            let planned = rig.plan(&[pass]);
            let (q, k, v) =
                (content(&pass, 0, 0, H, D), content(&pass, 0, 1, G, D), content(&pass, 0, 2, G, DV));
            let mut o = vec![7f32; F * H * DV];
            let stream = Stream::cpu();
            let mut forward = planned.forward("main", &stream);
            let fresh = KvEntries::Nhd {
                k: TensorRef::from_slice(&k, &[F, G, D]).unwrap(),
                v: TensorRef::from_slice(&v, &[F, G, DV]).unwrap(),
            };
            let q = Query::Heads(TensorRef::from_slice(&q, &[F, H, D]).unwrap());
            let out = AttnOut { o: TensorMut::from_slice(&mut o, &[F, H, DV]).unwrap(), lse: None };
            let before = COUNT.get();
            attend(&*rig.attn, &mut forward, q, Some(fresh), out).unwrap();
            assert_eq!(COUNT.get() - before, 0, "frame {frame}");
            drop(forward);
            rig.engine.commit(planned).unwrap();
        }
    });
}
