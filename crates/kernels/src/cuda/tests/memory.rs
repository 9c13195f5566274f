//! Memory of a device and memory pinned for it: taken, given back, served again, run out.

use super::*;
use crate::buffer::allocated_bytes_on;

#[test]
fn memory_is_zeroed_counted_and_given_back() {
    if context().is_none() {
        return;
    }
    // Tests run side by side, so only what is held here is counted: it is larger than all that they hold.
    const BYTES: usize = 64 << 20;
    let _alone = LARGE_BLOCKS.lock();
    let before = allocated_bytes_on(DEVICE);
    let buffer = Buffer::zeroed_on(DEVICE, BYTES).unwrap();
    assert!(allocated_bytes_on(DEVICE) >= BYTES);
    assert_eq!((buffer.device(), buffer.len(), buffer.pinned_for()), (DEVICE, BYTES, None));
    assert_eq!(buffer.as_ptr() as usize % 256, 0);
    assert_eq!(buffer.tensor(8, DType::F32, &[2]).unwrap().as_slice::<f32>(), None, "not the host's to read");
    let mut tail = vec![7u8; 4096];
    let last = buffer.tensor(BYTES - 4096, DType::U8, &[4096]).unwrap();
    copy(
        &OwnedStream::new(DEVICE).unwrap().stream(),
        last,
        crate::TensorMut::from_slice(&mut tail, &[4096]).unwrap(),
    )
    .unwrap();
    assert_eq!(tail, vec![0; 4096]);
    drop(buffer);
    assert!(allocated_bytes_on(DEVICE) < before + BYTES);
    let pinned = Buffer::pinned(DEVICE, 100).unwrap();
    assert_eq!((pinned.device(), pinned.pinned_for()), (Device::Cpu, Some(DEVICE)));
    assert_eq!(pinned.tensor(0, DType::U8, &[100]).unwrap().as_slice::<u8>().unwrap(), &[0; 100]);
    assert_eq!(Buffer::zeroed_on(DEVICE, 0).unwrap().len(), 0);
}

#[test]
fn memory_that_is_not_there_is_an_error_with_numbers() {
    let Some(context) = context() else { return };
    for bytes in [context.memory_bytes() + 1, usize::MAX] {
        match Buffer::zeroed_on(DEVICE, bytes).unwrap_err() {
            Error::OutOfMemory { bytes: asked, device, free: Some((free, total)), .. } => {
                assert_eq!((asked, device), (bytes, DEVICE));
                assert!(free <= total && total == context.memory_bytes());
            }
            other => panic!("{other}"),
        }
    }
    assert!(matches!(
        Buffer::pinned(DEVICE, usize::MAX),
        Err(Error::OutOfMemory { device: Device::Cpu, .. })
    ));
}

/// Tests run side by side, so the pool's numbers are others' too: these blocks are larger than all of theirs.
const LARGE: usize = 96 << 20;
/// Waits until what was given back serves again, as by itself it does once all work before has run.
fn settle(context: &Context) {
    let freeing = context.pool().expect("a device with pools").freeing();
    // SAFETY: the stream is the pool's.
    context.ask(|api, raw| unsafe { api.synchronize_stream(raw, freeing) }).unwrap();
}

/// Held by a test that takes large blocks.
static LARGE_BLOCKS: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[test]
fn freed_memory_serves_again_and_the_pool_does_not_grow() {
    let Some(context) = context() else { return };
    let Some(before) = context.pooled().unwrap() else { return };
    let _alone = LARGE_BLOCKS.lock();
    let _free = nothing_held_up();
    let bench = Bench::new();
    for turn in 0..6 {
        let mut buffer = Buffer::zeroed_on(DEVICE, LARGE).unwrap();
        fill(&bench.stream(), buffer.tensor_mut(0, DType::U8, &[LARGE]).unwrap(), turn).unwrap();
        drop(buffer);
        settle(context);
    }
    let held = context.pooled().unwrap().expect("it had one").held;
    assert!(held < before.held + 2 * LARGE, "six blocks of {LARGE} bytes took {} more", held - before.held);
}

#[test]
fn memory_that_serves_again_is_zeroed() {
    if context().is_none() {
        return;
    }
    let mut bench = Bench::new();
    for _ in 0..4 {
        let stream = bench.stream();
        fill(&stream, bench.device.tensor_mut(0, DType::I32, &[WORDS]).unwrap(), 7).unwrap();
        stream.synchronize().unwrap();
        bench.device = Buffer::zeroed_on(DEVICE, 4 * WORDS).unwrap();
        assert_eq!(bench.read(), vec![0; WORDS]);
    }
}

#[test]
fn memory_is_taken_and_given_back_while_a_stream_is_held_up() {
    let Some(context) = context() else { return };
    if context.pooled().unwrap().is_none() {
        return;
    }
    let mut bench = Bench::new();
    let stream = bench.stream();
    let held = HeldUp::new(&stream);
    bench.write_pinned(4);
    bench.upload().unwrap();
    // The copy above is still to come, and reads its target's address then: the block may not serve another before.
    let at = bench.device.as_ptr();
    bench.device = Buffer::zeroed_on(DEVICE, 4 * WORDS).unwrap();
    let others: Vec<Buffer> = (0..8).map(|_| Buffer::zeroed_on(DEVICE, 4 * WORDS).unwrap()).collect();
    assert!(
        others.iter().all(|buffer| buffer.as_ptr() != at),
        "freed memory served again before its last use"
    );
    drop(others);
    held.let_go(&stream);
    assert_eq!(bench.read(), vec![0; WORDS]);
    context.check().unwrap();
}

#[test]
fn pinned_memory_is_given_back_while_a_stream_is_held_up_and_serves_again_cleared() {
    let Some(context) = context() else { return };
    if context.pooled().unwrap().is_none() {
        return;
    }
    // Of a size that no other test asks for.
    const BYTES: usize = 44 << 20;
    let _alone = LARGE_BLOCKS.lock();
    let bench = Bench::new();
    let stream = bench.stream();
    let pinned = || Buffer::pinned(DEVICE, BYTES).unwrap();
    let mut target = Buffer::zeroed_on(DEVICE, 4 * WORDS).unwrap();
    let mut source = pinned();
    let at = source.as_ptr();
    source.tensor_mut(0, DType::U8, &[BYTES]).unwrap().as_mut_slice::<u8>().unwrap().fill(3);
    let held = HeldUp::new(&stream);
    let to = target.tensor_mut(0, DType::U8, &[4 * WORDS]).unwrap();
    let from = source.tensor(BYTES - 4 * WORDS, DType::U8, &[4 * WORDS]).unwrap();
    // SAFETY: nobody writes the source while it is copied: given back, it serves another when the copy has run.
    unsafe { copy_async(&stream, from, to) }.unwrap();
    drop(source);
    let other = pinned();
    assert_ne!(other.as_ptr(), at, "it served again before its last use");
    held.let_go(&stream);
    let mut words = vec![0u8; 4 * WORDS];
    let from = target.tensor(0, DType::U8, &[4 * WORDS]).unwrap();
    copy(&stream, from, crate::TensorMut::from_slice(&mut words, &[4 * WORDS]).unwrap()).unwrap();
    assert_eq!(words, vec![3; 4 * WORDS]);
    let again = {
        let _free = nothing_held_up();
        settle(context);
        pinned()
    };
    assert_eq!(again.as_ptr(), at, "what was given back serves again");
    assert!(
        again.tensor(0, DType::U8, &[BYTES]).unwrap().as_slice::<u8>().unwrap().iter().all(|&byte| byte == 0)
    );
    drop((again, other));
    context.trim().unwrap();
    context.check().unwrap();
}

#[test]
fn a_workspace_grows_while_a_stream_is_held_up() {
    if context().is_none_or(|context| context.pooled().unwrap().is_none()) {
        return;
    }
    let owned = OwnedStream::new(DEVICE).unwrap();
    let stream = owned.stream();
    let mut workspace = crate::plan::Workspace::on(DEVICE, 1 << 16).unwrap();
    let mut staged = crate::staged::Staged::with_capacity(&stream, 64).unwrap();
    let held = HeldUp::new(&stream);
    staged.set(&stream, &[1; 64]).unwrap();
    workspace.reserve_bytes(1 << 20).unwrap();
    assert!(staged.reserve(4096).unwrap());
    drop(workspace);
    held.let_go(&stream);
}

/// A stream of another's may be gone when memory is freed that it used: what is waited for was marked when it was used.
#[test]
fn memory_used_on_a_stream_of_anothers_waits_for_it() {
    let Some(context) = context() else { return };
    if context.pooled().unwrap().is_none() {
        return;
    }
    let raw = context.ask(|api, own| api.create_stream(own, false)).unwrap();
    // SAFETY: made above, and live to the end of the process.
    let stream = unsafe { Stream::from_raw(DEVICE, raw.0) };
    let held = HeldUp::new(&stream);
    let mut buffer = Buffer::zeroed_on(DEVICE, 4 * WORDS).unwrap();
    fill(&stream, buffer.tensor_mut(0, DType::I32, &[WORDS]).unwrap(), 1).unwrap();
    let at = buffer.as_ptr();
    drop(buffer);
    let others: Vec<Buffer> = (0..8).map(|_| Buffer::zeroed_on(DEVICE, 4 * WORDS).unwrap()).collect();
    assert!(
        others.iter().all(|buffer| buffer.as_ptr() != at),
        "freed memory served again before its last use"
    );
    held.let_go(&stream);
    context.check().unwrap();
}

#[test]
fn memory_given_back_in_a_capture_goes_when_it_has_ended() {
    let Some(context) = context() else { return };
    let stream = OwnedStream::new(DEVICE).unwrap();
    let (mine, theirs) = (Buffer::zeroed_on(DEVICE, 64).unwrap(), Buffer::zeroed_on(DEVICE, 64).unwrap());
    let errors = context.noted_errors();
    capture::<Error>(&stream.stream(), || {
        drop(mine);
        std::thread::scope(|scope| scope.spawn(|| drop(theirs)).join().expect("no panic"));
        Ok(())
    })
    .unwrap();
    drop(Buffer::zeroed_on(DEVICE, 64).unwrap());
    assert_eq!(context.noted_errors(), errors);
}

#[test]
fn memory_that_ran_out_leaves_everything_usable() {
    let Some(context) = context() else { return };
    let _alone = LARGE_BLOCKS.lock();
    let mut bench = Bench::new();
    bench.write_pinned(8);
    bench.upload().unwrap();
    // What is free now may be more in a moment: others give back.
    let _some = Buffer::zeroed_on(DEVICE, LARGE).unwrap();
    let refused = Buffer::zeroed_on(DEVICE, context.memory_bytes() - LARGE / 2).unwrap_err();
    let text = refused.wanted_for("a test's pages").to_string();
    let total = context.memory_bytes();
    assert!(
        text.contains("for a test's pages on cuda:0") && text.contains(&format!("of {total} free")),
        "{text}"
    );
    assert_eq!(bench.read(), vec![8; WORDS]);
    assert_eq!(Buffer::zeroed_on(DEVICE, 1 << 20).unwrap().len(), 1 << 20);
    context.check().unwrap();
}

/// A device whose driver has no pools: memory is the driver's plain one, and frees wait.
#[cfg(feature = "emulator")]
#[test]
fn a_device_without_pools_serves_too() {
    if context().is_none() {
        return;
    }
    let context = Context::without_pool().unwrap();
    assert_eq!(context.pooled().unwrap(), None);
    let ptr = context.take_memory(100).unwrap();
    // SAFETY: just taken, of the emulated device, whose memory is the host's.
    assert_eq!(unsafe { std::slice::from_raw_parts(ptr, 100) }, [0; 100]);
    // SAFETY: given back once.
    unsafe { context.give_memory(ptr) };
    context.check().unwrap();
    context.trim().unwrap();
}
