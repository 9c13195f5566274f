//! Contexts, memory, streams, graphs and launches on whatever device there is: the emulated one under the feature `emulator`,
//! a card elsewhere; where there is neither, they say so.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use super::*;
use crate::{Buffer, DType, Device, Error, Result, Stream, copy, copy_async, fill};

mod boxes;
mod cluster;
mod memory;
mod products;

const DEVICE: Device = Device::Cuda(0);

/// The device to test on, if there is one.
fn context() -> Option<&'static Context> {
    #[cfg(feature = "emulator")]
    assert!(emulate(), "another test chose the driver");
    match Context::of(DEVICE) {
        Ok(context) => Some(context),
        Err(why) => {
            println!("SKIPPED: {why}");
            None
        }
    }
}

/// A stream with a few words of the device and of pinned memory.
struct Bench {
    stream: OwnedStream,
    device: Buffer,
    pinned: Buffer,
}

const WORDS: usize = 1024;

impl Bench {
    fn new() -> Bench {
        Bench {
            stream: OwnedStream::new(DEVICE).unwrap(),
            device: Buffer::zeroed_on(DEVICE, 4 * WORDS).unwrap(),
            pinned: Buffer::pinned(DEVICE, 4 * WORDS).unwrap(),
        }
    }

    fn stream(&self) -> Stream {
        self.stream.stream()
    }

    fn write_pinned(&mut self, value: i32) {
        self.pinned.tensor_mut(0, DType::I32, &[WORDS]).unwrap().as_mut_slice().unwrap().fill(value);
    }

    /// Pinned to device, without a wait.
    fn upload(&mut self) -> Result<()> {
        let stream = self.stream();
        let src = self.pinned.tensor(0, DType::I32, &[WORDS])?;
        let dst = self.device.tensor_mut(0, DType::I32, &[WORDS])?;
        // SAFETY: the tests below write the pinned words only after a wait, but where they mean to be late.
        unsafe { copy_async(&stream, src, dst) }
    }

    /// The device's words.
    fn read(&self) -> Vec<i32> {
        let mut words = vec![0i32; WORDS];
        let dst = crate::TensorMut::from_slice(&mut words, &[WORDS]).unwrap();
        copy(&self.stream(), self.device.tensor(0, DType::I32, &[WORDS]).unwrap(), dst).unwrap();
        words
    }
}

fn code(error: Error) -> i32 {
    match error {
        Error::Cuda { code, .. } => code,
        other => panic!("no error of the driver: {other}"),
    }
}

#[test]
fn a_device_that_is_not_there_says_what_is() {
    assert!(matches!(Context::of(Device::Cpu), Err(Error::NoDevice { .. })));
    let why = Context::of(Device::Cuda(9999)).unwrap_err().to_string();
    assert!(why.starts_with("cuda:9999 cannot be used: "), "{why}");
    let Some(context) = context() else {
        // Without a driver each door gives the same answer.
        for error in [
            Buffer::zeroed_on(DEVICE, 1).unwrap_err(),
            Buffer::pinned(DEVICE, 1).unwrap_err(),
            OwnedStream::new(DEVICE).unwrap_err(),
            Event::new(DEVICE).unwrap_err(),
        ] {
            assert!(matches!(error, Error::NoDevice { device: DEVICE, .. }), "{error}");
        }
        return;
    };
    // Of those that are on paper, from the 64th down, other tests make some.
    let why = Context::of(Device::Cuda(30)).unwrap_err().to_string();
    assert!(why.contains("there is one card, cuda:0") || why.contains("cards, cuda:0 to"), "{why}");
    assert!(std::ptr::eq(context, Context::of(DEVICE).unwrap()));
    assert!(context.arch().0 >= 5 && context.sm_count() > 0);
    assert!(context.free_memory().unwrap() <= context.memory_bytes());
}

#[test]
fn tensors_go_there_and_back() {
    if context().is_none() {
        return;
    }
    let mut bench = Bench::new();
    let stream = bench.stream();
    let words: Vec<i32> = (0..WORDS as i32).collect();
    let host = crate::TensorRef::from_slice(&words, &[WORDS]).unwrap();
    copy(&stream, host, bench.device.tensor_mut(0, DType::I32, &[WORDS]).unwrap()).unwrap();
    assert_eq!(bench.read(), words);
    // Between two buffers of the device, a part of each.
    let mut other = Buffer::for_tensor_on(DEVICE, DType::I32, &[WORDS]).unwrap();
    let from = bench.device.tensor(4 * 16, DType::I32, &[2, 8]).unwrap();
    copy(&stream, from, other.tensor_mut(4 * 100, DType::I32, &[2, 8]).unwrap()).unwrap();
    bench.device = other;
    assert_eq!(bench.read()[99..117], [&[0][..], &words[16..32], &[0]].concat());
    fill(&stream, bench.device.tensor_mut(0, DType::I32, &[4]).unwrap(), 0xff).unwrap();
    assert_eq!(bench.read()[..5], [-1, -1, -1, -1, 0]);
}

#[test]
fn copies_refuse_what_does_not_fit() {
    let mut a = Buffer::zeroed(64).unwrap();
    let b = Buffer::zeroed(64).unwrap();
    let cpu = Stream::cpu();
    let src = || b.tensor(0, DType::I32, &[4, 4]).unwrap();
    let refused = |result: Result<()>| result.unwrap_err().to_string();
    let message = refused(copy(&cpu, src(), a.tensor_mut(0, DType::I32, &[16]).unwrap()));
    assert!(message.contains("dst") && message.contains("[4, 4]") && message.contains("[16]"), "{message}");
    let message = refused(copy(&cpu, src(), a.tensor_mut(0, DType::F32, &[4, 4]).unwrap()));
    assert!(message.contains("f32") && message.contains("i32"), "{message}");
    let message = refused(copy(&cpu, src().transpose(0, 1), a.tensor_mut(0, DType::I32, &[4, 4]).unwrap()));
    assert!(message.contains("src"), "{message}");
    if context().is_none() {
        return;
    }
    let mut bench = Bench::new();
    let here = bench.device.tensor(0, DType::I32, &[4, 4]).unwrap();
    fn a_view(a: &mut Buffer) -> crate::TensorMut<'_> {
        a.tensor_mut(0, DType::I32, &[4, 4]).unwrap()
    }
    assert!(matches!(copy(&cpu, here, a_view(&mut a)), Err(Error::DeviceMismatch { tensor: "src", .. })));
    assert!(matches!(
        copy(&bench.stream(), src(), a_view(&mut a)),
        Err(Error::DeviceMismatch { expected: DEVICE, .. })
    ));
    let there = bench.device.tensor_mut(0, DType::I32, &[4, 4]).unwrap();
    assert!(matches!(fill(&cpu, there, 1), Err(Error::DeviceMismatch { .. })));
}

#[test]
fn events_mark_places_and_hold_streams() {
    if context().is_none() {
        return;
    }
    let mut bench = Bench::new();
    let (first, second) = (Event::timed(DEVICE).unwrap(), Event::timed(DEVICE).unwrap());
    assert!(first.query().unwrap(), "an event that marks nothing has passed");
    let other = OwnedStream::new(DEVICE).unwrap();
    bench.write_pinned(3);
    first.record(&bench.stream()).unwrap();
    bench.upload().unwrap();
    second.record(&bench.stream()).unwrap();
    second.hold(&other.stream()).unwrap();
    // What comes after on the other stream sees the words.
    let mut words = vec![0i32; WORDS];
    let src = bench.device.tensor(0, DType::I32, &[WORDS]).unwrap();
    copy(&other.stream(), src, crate::TensorMut::from_slice(&mut words, &[WORDS]).unwrap()).unwrap();
    assert_eq!(words, vec![3; WORDS]);
    second.synchronize().unwrap();
    assert!(second.query().unwrap());
    assert!(first.elapsed_ms(&second).unwrap() >= 0.0);
    assert!(Event::new(DEVICE).unwrap().elapsed_ms(&second).is_err(), "not timed");
    assert!(first.record(&Stream::cpu()).is_err());
}

#[test]
fn a_stream_runs_in_order_while_the_host_goes_on() {
    if context().is_none() {
        return;
    }
    let bench = Bench::new();
    let stream = bench.stream();
    let (done, order) = (Arc::new(AtomicUsize::new(0)), 1..=3);
    // The emulated device runs work when somebody waits for it, so the host opens the gate before it does.
    let (open, gate) = mpsc::channel::<()>();
    call_host(&stream, move || gate.recv().expect("the sender is kept")).unwrap();
    for turn in order {
        let done = done.clone();
        call_host(&stream, move || assert_eq!(done.fetch_add(1, Ordering::SeqCst) + 1, turn)).unwrap();
    }
    assert_eq!(done.load(Ordering::SeqCst), 0, "nothing ran behind the gate");
    open.send(()).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(done.load(Ordering::SeqCst), 3);
    assert!(stream.is_idle().unwrap());
}

/// A staging buffer that is written again before its copy ran: the copy sees the later words. That is what a card may do, and
/// what the emulated device always does.
#[cfg(feature = "emulator")]
#[test]
fn f19_a_copy_reads_pinned_memory_when_it_runs() {
    let Some(_) = context() else { return };
    let mut bench = Bench::new();
    bench.write_pinned(1);
    bench.upload().unwrap();
    bench.write_pinned(2);
    assert_eq!(bench.read(), vec![2; WORDS]);
}

#[test]
fn a_graph_replays_what_was_captured_and_runs_nothing_before() {
    if context().is_none() {
        return;
    }
    let mut bench = Bench::new();
    let stream = bench.stream();
    bench.write_pinned(5);
    let graph = capture::<Error>(&stream, || bench.upload()).unwrap();
    assert_eq!(graph.nodes(), 1);
    assert_eq!(bench.read(), vec![0; WORDS]);
    for value in [5, 6] {
        // A replay reads the pinned words as they are then.
        bench.write_pinned(value);
        // SAFETY: both buffers live, and are read after a wait.
        unsafe { graph.launch(&stream) }.unwrap();
        assert_eq!(bench.read(), vec![value; WORDS]);
    }
    // On another stream too, but not on another device's.
    let other = OwnedStream::new(DEVICE).unwrap();
    bench.write_pinned(7);
    // SAFETY: as above.
    unsafe { graph.launch(&other.stream()) }.unwrap();
    other.stream().synchronize().unwrap();
    assert_eq!(bench.read(), vec![7; WORDS]);
    // SAFETY: it is refused.
    assert!(unsafe { graph.launch(&Stream::cpu()) }.is_err());
    assert!(capture::<Error>(&Stream::cpu(), || Ok(())).is_err());
    assert_eq!(capture::<Error>(&stream, || Ok(())).unwrap().nodes(), 0);
}

#[test]
fn a_capture_refuses_allocations_waits_and_pageable_copies_and_leaves_the_stream_whole() {
    if context().is_none() {
        return;
    }
    let mut bench = Bench::new();
    let stream = bench.stream();
    let mut words = vec![0i32; WORDS];
    let (device, pinned) = (&bench.device, &bench.pinned);
    let mut refusals: Vec<Box<dyn FnMut() -> Result<()> + '_>> = vec![
        Box::new(|| Buffer::zeroed_on(DEVICE, 64).map(drop)),
        Box::new(|| stream.synchronize()),
        Box::new(|| call_host(&stream, || ())),
        Box::new(|| {
            let dst = crate::TensorMut::from_slice(&mut words, &[WORDS])?;
            copy(&stream, device.tensor(0, DType::I32, &[WORDS])?, dst)
        }),
        Box::new(|| {
            let event = Event::new(DEVICE)?;
            event.record(&OwnedStream::new(DEVICE)?.stream())?;
            // Work outside of the capture cannot be waited for inside.
            event.hold(&stream)
        }),
    ];
    for (case, refused) in refusals.iter_mut().enumerate() {
        let mut inside = Ok(());
        let outcome = capture::<Error>(&stream, || {
            inside = refused();
            inside.clone()
        });
        assert!(inside.is_err(), "case {case}");
        assert_eq!(outcome.map(drop).unwrap_err(), inside.unwrap_err(), "case {case}");
    }
    drop(refusals);
    assert_eq!(pinned.len(), 4 * WORDS);
    // The stream works as before, captured or not; an error of the caller's own ends a capture too.
    let outcome = capture::<Error>(&stream, || Err(Error::Workspace { needed: 1, available: 0 }));
    assert!(matches!(outcome, Err(Error::Workspace { .. })));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        capture::<Error>(&stream, || panic!("in a capture")).map(drop)
    }));
    assert!(panicked.is_err());
    bench.write_pinned(9);
    capture::<Error>(&stream, || bench.upload()).unwrap();
    assert_eq!(bench.read(), vec![0; WORDS]);
    bench.upload().unwrap();
    assert_eq!(bench.read(), vec![9; WORDS]);
}

#[test]
fn another_thread_allocates_while_this_one_captures() {
    if context().is_none() {
        return;
    }
    let stream = OwnedStream::new(DEVICE).unwrap();
    capture::<Error>(&stream.stream(), || {
        std::thread::scope(|scope| {
            scope.spawn(|| Buffer::zeroed_on(DEVICE, 64).map(drop)).join().expect("no panic")
        })
    })
    .unwrap();
}

#[test]
fn a_stream_given_back_serves_again() {
    if context().is_none() {
        return;
    }
    let stale = OwnedStream::new(DEVICE).unwrap().stream();
    // It was dropped; a copy of the handle is still a stream.
    stale.synchronize().unwrap();
}

#[test]
fn modules_that_are_none_are_refused() {
    if context().is_none() {
        return;
    }
    for bytes in [&b""[..], b"\x7fELF", &[0u8; 4096]] {
        // SAFETY: no code is in it.
        let refused = unsafe { Module::load(DEVICE, Image::Cubin(bytes)) };
        assert_eq!(code(refused.unwrap_err()), 200);
    }
    // SAFETY: there is no such file.
    let refused = unsafe { Module::load(DEVICE, Image::SharedObject("/nowhere/at-all.so".as_ref())) };
    assert!(refused.unwrap_err().to_string().contains("kernel cache"));
}

/// A plan is made and sent while the stream is held up: neither waits for it.
#[cfg(feature = "paged")]
#[test]
fn f19_planning_never_waits_for_the_stream() {
    use crate::paged::{Geometry, PageTable, ScheduleOptions, Target, Variant, schedule};

    if context().is_none() {
        return;
    }
    let owned = OwnedStream::new(DEVICE).unwrap();
    let stream = owned.stream();
    let geometry = Geometry {
        num_qo_heads: 2,
        num_kv_heads: 1,
        head_dim_qk: 32,
        head_dim_vo: 32,
        page_size: 16,
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
    };
    let options = ScheduleOptions { target: Target::of(DEVICE), ..ScheduleOptions::default() };
    let mut work = crate::work::WorkList::default();
    let mut plan = |last: i32| {
        let table = PageTable {
            qo_indptr: &[0, 1],
            kv_indptr: &[0, 2],
            kv_indices: &[3, 1],
            kv_last_page_len: &[last],
            num_pages: 4,
            ..PageTable::default()
        };
        schedule(&geometry, &Variant::causal(32), &table, &options, &mut work).unwrap();
        work.stage(&stream).unwrap();
    };
    // The first one builds its kernels and takes its memory.
    plan(1);
    stream.synchronize().unwrap();
    let held = HeldUp::new(&stream);
    plan(2);
    plan(3);
    held.let_go(&stream);
}

/// Holds a stream up; the gate that lets it go on.
/// Held while a stream is held up: what is given back meanwhile waits for that stream too.
static HOLDING_UP: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// No stream is held up while this is had.
fn nothing_held_up() -> std::sync::MutexGuard<'static, ()> {
    HOLDING_UP.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

struct HeldUp {
    _one: std::sync::MutexGuard<'static, ()>,
    open: mpsc::Sender<()>,
    passed: mpsc::Receiver<bool>,
}

impl HeldUp {
    fn new(stream: &Stream) -> HeldUp {
        let one = nothing_held_up();
        let (open, gate) = mpsc::channel::<()>();
        let (tell, passed) = mpsc::channel();
        // So that what waits fails, and does not hang.
        let held = move || {
            let opened = gate.recv_timeout(std::time::Duration::from_secs(60)).is_ok();
            tell.send(opened).expect("the test waits for it");
        };
        call_host(stream, held).unwrap();
        HeldUp { _one: one, open, passed }
    }

    /// Lets it go on. Nothing before waited for it, or it would have given up.
    #[track_caller]
    fn let_go(self, stream: &Stream) {
        assert!(self.passed.try_recv().is_err(), "something went on only when the stream did");
        self.open.send(()).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(self.passed.recv(), Ok(true));
    }
}

#[test]
fn peaks_are_measured_and_strange_tensors_refused() {
    if context().is_none() {
        return;
    }
    let bench = Bench::new();
    let stream = bench.stream();
    peak::prepare(DEVICE).unwrap();
    let words = bench.device.tensor(0, DType::I32, &[WORDS]).unwrap();
    peak::read(&stream, words).unwrap();
    // Eight products of 16 x 16 by 16 x 8 a warp and round; four of 64 x 16 by 16 x 256 a warpgroup.
    let (once, thrice) = (peak::multiply(&stream, 1).unwrap(), peak::multiply(&stream, 3).unwrap());
    let round =
        if Context::of(DEVICE).unwrap().is_hopper() { 2.0 * 64.0 * 64.0 * 256.0 } else { 8.0 * 4096.0 };
    assert_eq!((once % round, thrice), (0.0, 3.0 * once));
    stream.synchronize().unwrap();
    assert!(
        peak::read(&stream, words.narrow(0, 1, 8).unwrap()).unwrap_err().to_string().contains("16 bytes")
    );
    let host = bench.pinned.tensor(0, DType::I32, &[WORDS]).unwrap();
    assert!(matches!(peak::read(&stream, host), Err(Error::DeviceMismatch { .. })));
    let gaps = bench.device.tensor(0, DType::I32, &[32, 32]).unwrap().narrow(1, 0, 8).unwrap();
    assert!(matches!(peak::read(&stream, gaps), Err(Error::Layout { .. })));
}

#[cfg(feature = "emulator")]
mod kernels {
    use super::*;

    /// A kernel as the emulator's header makes them: it adds a number to each of its words.
    const SOURCE: &str = "
        struct Params { int* words; unsigned long count; int add; int fail; };
        extern \"C\" int add__run(unsigned gx, unsigned gy, unsigned gz, unsigned block, unsigned shared, const void* raw) {
            const Params& p = *static_cast<const Params*>(raw);
            if (p.fail) return 1;
            for (unsigned long i = 0; i < p.count && i < (unsigned long)gx * gy * gz * block; ++i) p.words[i] += p.add;
            return 0;
        }";

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        words: u64,
        count: u64,
        add: i32,
        fail: i32,
    }

    /// The kernel, compiled and loaded; absent where there is no compiler.
    fn add(shared: u32) -> Option<Function> {
        context()?;
        let folder = tempfile::tempdir().unwrap();
        let (source, object) = (folder.path().join("add.cpp"), folder.path().join("add.so"));
        std::fs::write(&source, SOURCE).unwrap();
        let mut command = std::process::Command::new("g++");
        command.args(["-shared", "-fPIC", "-O1", "-o"]).args([&object, &source]);
        match command.status() {
            Ok(status) => assert!(status.success()),
            Err(why) => {
                println!("SKIPPED: g++: {why}");
                return None;
            }
        }
        // SAFETY: the object was just made of the text above.
        let module = unsafe { Module::load(DEVICE, Image::SharedObject(&object)) }.unwrap();
        assert_eq!(code(module.function("subtract", 0).unwrap_err()), 500);
        assert!(module.function("add", u32::MAX).is_err());
        Some(module.function("add", shared).unwrap())
    }

    const LAUNCH: Launch = Launch { grid: [8, 1, 1], block: 128, shared: 0 };

    impl Bench {
        fn params(&self, add: i32) -> Params {
            Params { words: self.device.as_ptr() as u64, count: WORDS as u64, add, fail: 0 }
        }

        fn add(&self, function: &Function, launch_as: Launch, params: Params) -> Result<()> {
            // SAFETY: the parameter is that of the kernel, which keeps to `WORDS` words of a buffer that lives.
            unsafe { launch(function, &self.stream(), launch_as, &params) }
        }
    }

    #[test]
    fn a_launch_runs_in_order_with_the_parameters_of_its_call() {
        let Some(function) = add(0) else { return };
        let mut bench = Bench::new();
        for value in [1, 10] {
            bench.add(&function, LAUNCH, bench.params(value)).unwrap();
        }
        bench.add(&function, Launch { grid: [0, 1, 1], ..LAUNCH }, bench.params(100)).unwrap();
        assert_eq!(bench.read(), vec![11; WORDS]);
        bench.write_pinned(-3);
        bench.upload().unwrap();
        bench.add(&function, LAUNCH, bench.params(2)).unwrap();
        assert_eq!(bench.read(), vec![-1; WORDS]);
        assert_eq!(function.device(), DEVICE);
        assert_eq!(function.attributes().unwrap().local_bytes, 0);
        assert_eq!(function.blocks_per_sm(1024, 0).unwrap(), 1);
        assert_eq!(function.blocks_per_sm(1025, 0).unwrap(), 0);
    }

    #[test]
    fn launches_beyond_a_limit_are_refused() {
        let Some(function) = add(100 << 10) else { return };
        let bench = Bench::new();
        for beyond in [
            Launch { block: 0, ..LAUNCH },
            Launch { block: 1025, ..LAUNCH },
            Launch { shared: (100 << 10) + 1, ..LAUNCH },
            Launch { grid: [1, 65536, 1], ..LAUNCH },
            Launch { grid: [u32::MAX, 1, 1], ..LAUNCH },
        ] {
            assert_eq!(code(bench.add(&function, beyond, bench.params(1)).unwrap_err()), 1, "{beyond:?}");
        }
        bench.add(&function, Launch { shared: 100 << 10, ..LAUNCH }, bench.params(1)).unwrap();
        // SAFETY: it is refused.
        let refused = unsafe { launch(&function, &Stream::cpu(), LAUNCH, &bench.params(1)) };
        assert!(matches!(refused, Err(Error::DeviceMismatch { .. })));
        assert_eq!(bench.read(), vec![1; WORDS]);
    }

    #[test]
    fn a_graph_keeps_parameters_and_rereads_memory() {
        let Some(function) = add(0) else { return };
        let mut bench = Bench::new();
        let stream = bench.stream();
        let mut params = bench.params(1);
        let graph = capture::<Error>(&stream, || {
            bench.upload()?;
            bench.add(&function, LAUNCH, params)
        })
        .unwrap();
        params.add = 1000;
        assert_eq!((graph.nodes(), params.add), (2, 1000));
        for value in [10, 20] {
            bench.write_pinned(value);
            // SAFETY: both buffers live, and are read after a wait.
            unsafe { graph.launch(&stream) }.unwrap();
            assert_eq!(bench.read(), vec![value + 1; WORDS]);
        }
    }
}
