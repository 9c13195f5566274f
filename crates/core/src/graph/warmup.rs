//! Running every bucket once in every slot, with requests that do not exist.
//!
//! On a device this is where graphs are captured; on the CPU the same padded forwards run as they are, so that
//! whatever grows has grown and whatever cannot run is known before the first request.

use super::{Bucket, Buckets};
use crate::resource::PlannedStep;
use crate::{Engine, Error, RequestId, Result, Slot, Step};

/// Sizes every resource's buffers for every bucket, then takes each bucket through one step of dummy requests in each
/// slot: `declare` says what the step is, given its rows as (request, query tokens); `run` is the forward, whole or region
/// after region under the one lease. A bucket of several rows is warmed up by one row without tokens and padding for the
/// rest, which takes no page whatever the pool's size; a bucket of one row by a row of all its tokens. Every such step is aborted and every dummy removed;
/// [`Engine::post_warmup_validate`] has the last word.
///
/// # Errors
/// A bucket that is refused, by name; what `run` or a resource says. No dummy request is left either way.
pub fn warm_up(
    engine: &Engine,
    buckets: &Buckets,
    declare: impl Fn(&Bucket, &[(RequestId, usize)]) -> Step,
    mut run: impl FnMut(&PlannedStep) -> Result<()>,
) -> Result<()> {
    engine.build_accelerator_graph_buffers(buckets.iter())?;
    let dummies = engine.ingest_dummies(1)?;
    let mut outcome = Ok(());
    for bucket in buckets.iter() {
        outcome = outcome.and_then(|()| warm_bucket(engine, &bucket, &dummies, &declare, &mut run));
    }
    for dummy in &dummies {
        outcome = outcome.and(engine.remove(dummy));
    }
    outcome?;
    engine.post_warmup_validate()
}

fn warm_bucket(
    engine: &Engine,
    bucket: &Bucket,
    dummies: &[RequestId],
    declare: impl Fn(&Bucket, &[(RequestId, usize)]) -> Step,
    run: &mut impl FnMut(&PlannedStep) -> Result<()>,
) -> Result<()> {
    let q_len = if bucket.shape.rows == 1 { bucket.shape.tokens } else { 0 };
    let rows: Vec<(RequestId, usize)> = dummies.iter().map(|id| (id.clone(), q_len)).collect();
    for slot in 0..engine.slots() {
        let step = declare(bucket, &rows);
        let admission = engine.admit_in_slot(step, bucket, Slot(slot))?;
        let admitted = admission.admitted().map_err(|refusal| refused(bucket, &refusal.to_string()))?;
        let planned = engine.plan(admitted)?;
        let ran = run(&planned);
        engine.abort(planned);
        ran?;
    }
    Ok(())
}

fn refused(bucket: &Bucket, why: &str) -> Error {
    Error::Order { call: "graph::warm_up", why: format!("bucket {bucket}: {why}") }
}

#[cfg(test)]
mod tests;
