//! The manager level over a real cache and engine.

mod declared;
mod faults;
mod life;

use mstar_core::attend::Softmax;
use mstar_core::graph::{Bucket, Buckets, warm_up};
use mstar_core::resource::PaddedShape;
use mstar_core::step::{AttentionStep, Combined, Declaration, Fork, KvStep, MaskKeys, RowMask};
use mstar_core::{Admission, Attention, Error, Label, Resource, Segment, Step, StepSerial};
use mstar_kernels::reference::paged::Options;
use mstar_kernels::{Stream, TensorMut, TensorRef};

use crate::rig::{self, D, G, H, L, Rig, RowOut, close, plan_id, saying, segment, step};
use crate::{OverPages, PagedOptions, PlanCounts};

fn find<'a>(rows: &'a [RowOut], request: &str) -> &'a RowOut {
    rows.iter().find(|row| row.request.as_str() == request).unwrap()
}

fn shape(rows: usize, tokens: usize) -> Option<PaddedShape> {
    Some(PaddedShape { rows, tokens })
}
