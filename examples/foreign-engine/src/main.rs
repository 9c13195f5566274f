//! An engine that keeps its own latents and page tables and attends them through `mstar-attn-mla` alone: no store, no
//! step, no spec.
//!
//! Requests arrive, prefill their prompt in chunks beside others that decode, and leave; their pages go back to the
//! engine's own allocator and are taken by whoever comes next. Every step is one plan over ragged rows, made again in
//! place in a buffer of fixed shape, as a captured graph would want it. Each result is held against a plain loop; the
//! program fails when a number is wrong.

mod engine;
mod model;
mod plain;
mod pool;

use std::error::Error;

use crate::engine::Engine;

/// Prompt tokens and generated tokens of each request, in order of arrival.
const REQUESTS: [(usize, usize); 6] = [(37, 20), (5, 30), (150, 8), (1, 25), (64, 12), (90, 5)];

/// The largest difference that f32 sums over these lengths explain.
const TOLERANCE: f64 = 2e-5;

fn main() -> Result<(), Box<dyn Error>> {
    let mut engine = Engine::new()?;
    let mut waiting = REQUESTS.iter();
    let (mut steps, mut rows, mut worst) = (0usize, 0usize, 0f64);
    loop {
        // One arrival a step while there is room.
        if engine.has_room()
            && let Some(&(prompt, generated)) = waiting.next()
        {
            engine.arrive(prompt, generated);
        }
        let Some(step) = engine.step()? else { break };
        steps += 1;
        rows += step.rows;
        worst = worst.max(step.worst);
    }
    engine.check_pool()?;
    println!(
        "{} requests, {steps} steps of {rows} rows through {} pages of our own: largest difference from a plain loop {worst:.1e}",
        REQUESTS.len(),
        pool::PAGES
    );
    if !(worst < TOLERANCE) {
        return Err(format!("the difference should be below {TOLERANCE:e}, it is {worst}").into());
    }
    Ok(())
}
