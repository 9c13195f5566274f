//! Before the first request: every bucket once in every slot, with requests that do not exist.
//!
//! What grows has grown then, and a shape that cannot run is known before work is lost to it.

use anyhow::Context;
use mstar_core::graph::{Bucket, warm_up};
use mstar_core::step::{Declaration, KvStep, RingSegment, RingStep};
use mstar_core::{Label, PlanId, PlannedStep, RequestId, Segment, Step};

use super::buffers::Buffers;
use super::model::Model;
use super::script::CONTEXT;

/// Warms every bucket, and proves that no dummy request is left.
pub(crate) fn up(model: &Model, buffers: &mut Buffers) -> anyhow::Result<()> {
    if model.buckets.is_empty() {
        return Ok(());
    }
    let declare = |bucket: &Bucket, rows: &[(RequestId, usize)]| declared(model, bucket, rows);
    warm_up(&model.engine, &model.buckets, declare, |planned| run(model, buffers, planned))
        .context("graph.buckets: a bucket cannot run")
}

fn declared(model: &Model, bucket: &Bucket, rows: &[(RequestId, usize)]) -> Step {
    if let Some(frame) = model.parts.frame {
        // A pass is a whole frame, be its world nobody's.
        let pass = |(request, _): &(RequestId, usize)| RingSegment {
            request: request.clone(),
            label: Label::main(),
            span: frame,
            frame_pos: 0,
            commit: false,
        };
        let ring = RingStep { segments: rows.iter().map(pass).collect() };
        return Step::new(bucket.walk.as_str()).with(model.parts.kv.clone(), Declaration::Ring(ring));
    }
    let segments = |label: &Label, spans: bool| -> Vec<Segment> {
        let segment = |(request, span): &(RequestId, usize)| Segment {
            request: request.clone(),
            label: label.clone(),
            span: if spans { *span } else { 0 },
            tokens: [].into(),
        };
        rows.iter().map(segment).collect()
    };
    let kv = KvStep { segments: segments(&Label::main(), true), ..KvStep::default() };
    let step = Step::new(bucket.walk.as_str()).with(model.parts.kv.clone(), Declaration::Kv(kv));
    match &model.parts.context {
        Some(name) => {
            let context = KvStep { segments: segments(&Label::new(CONTEXT), false), ..KvStep::default() };
            step.with(name.clone(), Declaration::Kv(context))
        }
        None => step,
    }
}

/// One forward over whatever the buffers hold.
fn run(model: &Model, buffers: &mut Buffers, planned: &PlannedStep) -> mstar_core::Result<()> {
    let stream = model.queue.stream();
    for label in model.kv.plan_labels(planned.serial())? {
        let id = PlanId { slot: planned.slot(), label: label.clone(), serial: planned.serial() };
        let tokens = model.kv.packed(&id)?.tokens;
        let mut forward = planned.forward(label, &stream);
        for layer in 0..model.layers {
            forward.set_layer(layer);
            for (turn, room) in model.own.iter().enumerate() {
                room.attend(&mut forward, buffers.views(tokens)?, turn == 0)?;
            }
            for room in &model.cross {
                room.attend_context(&mut forward, buffers.views(tokens)?)?;
            }
        }
    }
    Ok(())
}
