//! Layers allocate nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use mstar_core::attend::{IndexFormat, IndexStore};
use mstar_core::resource::PaddedShape;
use mstar_kernels::Buffer;

use crate::rig::{C, H, Inputs, L, Rig, Setup, step};

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

fn allocations(work: impl FnOnce()) -> usize {
    let before = COUNT.get();
    work();
    COUNT.get() - before
}

#[test]
fn layers_allocate_nothing() {
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    one.install(|| {
        for (store, format) in [
            (IndexStore::Pages, IndexFormat::F32),
            (IndexStore::Pages, IndexFormat::Fp8),
            (IndexStore::Buffers, IndexFormat::Fp8),
            (IndexStore::Buffers, IndexFormat::F32),
        ] {
            let setup = Setup { store, format, ..Setup::default() };
            let rig = Rig::new(setup.clone());
            rig.ingest(&["a", "b", "c"]);
            let decode = PaddedShape { rows: 4, tokens: 4 };
            // A prefill that crosses `topk`, then decode rows on both sides of it, eager and in a bucket.
            let turns: [(&[(&str, usize)], _); 3] = [
                (&[("a", 30), ("b", 7)], None),
                (&[("a", 1), ("b", 1), ("c", 3)], None),
                (&[("a", 1), ("b", 1)], Some(decode)),
            ];
            for (turn, (rows, bucket)) in turns.into_iter().enumerate() {
                let planned = rig.planned(step(rows), bucket);
                let tokens = rig.kv_plan(&planned, "main").slots.len();
                let stream = mstar_kernels::Stream::cpu();
                let mut forward = planned.forward("main", &stream);
                let inputs = Inputs::new(&rig, tokens);
                let mut o = Buffer::for_tensor(setup.dtype, &[tokens, H, C]).unwrap();
                let mut lse = vec![0f32; tokens * H];
                for pass in 0..2 {
                    for layer in 0..L {
                        forward.set_layer(layer);
                        let count = allocations(|| inputs.attend(&rig, &mut forward, &mut o, &mut lse));
                        assert!(
                            pass == 0 || count == 0,
                            "{store:?} {format} turn {turn} layer {layer}: {count}"
                        );
                    }
                }
                rig.engine.commit(planned).unwrap();
            }
        }
    });
}
