//! An engine that keeps its keys and values in device memory of its own, works on a stream of its own, and attends them through
//! `mstar-attn-paged` alone: no store, no step, no spec. mstar works in the card's primary context, so the engine's addresses
//! and its stream are handed over as they are.
//!
//! Three sequences of different lengths decode one token each; every row is held against a plain loop. The program fails when a
//! number is wrong. Where there is no card it says so, and that is no failure.

use std::error::Error;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, result, sys};
use mstar_attn_paged::{
    DType, Device, Geometry, Inputs, Outputs, PageTable, Plan, PlanOptions, Stream, TensorMut, TensorRef,
    Variant, Workspace, run,
};

/// The model's layer: 8 query heads over 2 key heads of width 64.
const QUERY_HEADS: usize = 8;
const KEY_HEADS: usize = 2;
const WIDTH: usize = 64;
const PAGE_SIZE: usize = 16;
const PAGES: usize = 64;
/// Keys of each sequence.
const LENGTHS: [usize; 3] = [5, 16, 700];

/// The engine's card; `Err` says why there is none. Nothing here panics without a driver.
fn card() -> Result<Arc<CudaContext>, String> {
    // SAFETY: opens the driver's library by name, if it is installed.
    if !unsafe { sys::is_culib_present() } {
        return Err("no CUDA driver".into());
    }
    if result::init().is_err() || !result::device::get_count().is_ok_and(|count| count > 0) {
        return Err("the CUDA driver sees no card".into());
    }
    let context = CudaContext::new(0).map_err(|error| error.to_string())?;
    // SAFETY: everything below happens on one stream.
    unsafe { context.disable_event_tracking() };
    Ok(context)
}

fn main() -> Result<(), Box<dyn Error>> {
    let context = match card() {
        Ok(context) => context,
        Err(why) => {
            println!("SKIPPED: {why}");
            return Ok(());
        }
    };
    let stream = context.new_stream()?;
    // SAFETY: a live stream of the card's primary context, which is what this engine works in; it outlives the calls below.
    let ours = unsafe { Stream::from_raw(Device::Cuda(0), stream.cu_stream().cast()) };

    // The pool: `[P, S, G, D]` for keys and again for values; a sequence takes pages from anywhere.
    let pool = [PAGES, PAGE_SIZE, KEY_HEADS, WIDTH];
    let noise = |salt: usize, len: usize| -> Vec<f32> { (0..len).map(|i| noise(salt + i)).collect() };
    let len = pool.iter().product();
    let (keys, values) = (noise(1 << 20, len), noise(1 << 24, len));
    let (k, v) = (stream.clone_htod(&keys)?, stream.clone_htod(&values)?);
    let mut kv_indptr = vec![0];
    let mut kv_indices = Vec::new();
    for length in LENGTHS {
        for _ in 0..length.div_ceil(PAGE_SIZE) {
            kv_indices.push((kv_indices.len() * 37 % PAGES) as i32);
        }
        kv_indptr.push(kv_indices.len() as i32);
    }
    let table = PageTable {
        qo_indptr: &[0, 1, 2, 3],
        kv_indptr: &kv_indptr,
        kv_indices: &kv_indices,
        kv_last_page_len: &LENGTHS.map(|length| ((length - 1) % PAGE_SIZE + 1) as i32),
        num_pages: PAGES,
        ..PageTable::default()
    };

    // Planned on the host for the card, and sent there in the order of our stream.
    let geometry = Geometry {
        num_qo_heads: QUERY_HEADS,
        num_kv_heads: KEY_HEADS,
        head_dim_qk: WIDTH,
        head_dim_vo: WIDTH,
        page_size: PAGE_SIZE,
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
    };
    let options = PlanOptions { device: Device::Cuda(0), ..PlanOptions::default() };
    let mut plan = Plan::new(&geometry, &Variant::causal(WIDTH), &table, &options)?;
    plan.stage(&ours)?;
    let mut workspace = Workspace::on(Device::Cuda(0), plan.workspace_bytes())?;

    let rows = [LENGTHS.len(), QUERY_HEADS, WIDTH];
    let queries = noise(7, rows.iter().product());
    let q = stream.clone_htod(&queries)?;
    let mut o = stream.alloc_zeros::<f32>(queries.len())?;
    run(
        &plan,
        &ours,
        &mut workspace,
        Inputs {
            q: lent(&q, &stream, &rows)?,
            k: lent(&k, &stream, &pool)?,
            v: lent(&v, &stream, &pool)?,
            sinks: None,
            alibi_slopes: None,
        },
        Outputs { o: lent_mut(&mut o, &stream, &rows)?, lse: None },
    )?;
    let got = stream.clone_dtoh(&o)?;
    stream.synchronize()?;

    let mut worst = 0f32;
    for (row, length) in LENGTHS.into_iter().enumerate() {
        let pages = &kv_indices[kv_indptr[row] as usize..kv_indptr[row + 1] as usize];
        for head in 0..QUERY_HEADS {
            let at = (row * QUERY_HEADS + head) * WIDTH;
            let entry = |token: usize| {
                let slot = pages[token / PAGE_SIZE] as usize * PAGE_SIZE + token % PAGE_SIZE;
                (slot * KEY_HEADS + head / (QUERY_HEADS / KEY_HEADS)) * WIDTH
            };
            let wanted = plain_attention(&queries[at..at + WIDTH], length, &keys, &values, entry);
            for (got, wanted) in got[at..at + WIDTH].iter().zip(wanted) {
                worst = worst.max((got - wanted).abs());
            }
        }
    }
    println!(
        "{} rows over {PAGES} pages of our own on {}: largest difference from a plain loop {worst:.1e}",
        LENGTHS.len(),
        context.name()?
    );
    if !(worst < 1e-5) {
        return Err(format!("the difference should be below 1e-5, it is {worst}").into());
    }
    Ok(())
}

/// The engine's memory as a tensor.
fn lent<'a>(
    slice: &'a CudaSlice<f32>,
    stream: &CudaStream,
    shape: &[usize],
) -> Result<TensorRef<'a>, Box<dyn Error>> {
    assert_eq!(shape.iter().product::<usize>(), slice.len());
    let (address, _) = slice.device_ptr(stream);
    // SAFETY: `slice` is that many floats on the card, borrowed for as long as the tensor, and used on one stream alone.
    Ok(unsafe {
        TensorRef::from_raw_parts(address as *const u8, Device::Cuda(0), DType::F32, shape, &packed(shape))?
    })
}

/// The same, to write to.
fn lent_mut<'a>(
    slice: &'a mut CudaSlice<f32>,
    stream: &CudaStream,
    shape: &[usize],
) -> Result<TensorMut<'a>, Box<dyn Error>> {
    assert_eq!(shape.iter().product::<usize>(), slice.len());
    let (address, _) = slice.device_ptr_mut(stream);
    // SAFETY: as in `lent`, and the borrow is unique.
    Ok(unsafe {
        TensorMut::from_raw_parts(address as *mut u8, Device::Cuda(0), DType::F32, shape, &packed(shape))?
    })
}

/// Row-major strides.
fn packed(shape: &[usize]) -> Vec<usize> {
    (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect()
}

/// Softmax attention of one query over `length` keys, in f64.
fn plain_attention(
    q: &[f32],
    length: usize,
    keys: &[f32],
    values: &[f32],
    entry: impl Fn(usize) -> usize,
) -> Vec<f32> {
    let score = |token: usize| -> f64 {
        let key = &keys[entry(token)..][..WIDTH];
        let dot: f64 = q.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
        dot / (WIDTH as f64).sqrt()
    };
    let scores: Vec<f64> = (0..length).map(score).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let value = |lane: usize| -> f64 {
        (0..length).map(|token| weights[token] * f64::from(values[entry(token) + lane])).sum::<f64>() / sum
    };
    (0..WIDTH).map(|lane| value(lane) as f32).collect()
}

/// A number in -1..1.
fn noise(i: usize) -> f32 {
    let mut bits = (i as u32).wrapping_mul(0x9e37_79b9);
    bits ^= bits >> 15;
    bits = bits.wrapping_mul(0x85eb_ca6b);
    (bits >> 8) as f32 / (1 << 23) as f32 - 1.0
}
