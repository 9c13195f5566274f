//! Query rows of one plan laid over the contexts of another.

use std::collections::HashMap;
use std::sync::Arc;

use mstar_core::attend::pages::Arrays;
use mstar_core::graph::padded_q_lens;
use mstar_core::kv::KvPlan;
use mstar_core::resource::PaddedShape;
use mstar_core::{Error, Label, RequestId, ResourceName, Result, Segment};

use mstar_kernels::mutant::planted;

/// One row of queries.
#[derive(Clone, Debug)]
pub(super) struct QueryRow {
    /// Whose; `None` pads.
    stream: Option<(RequestId, Label)>,
    q_len: usize,
}

/// The rows of a cache's plan, its padding among them.
pub(super) fn of_plan(plan: &KvPlan) -> Vec<QueryRow> {
    let rows = plan.rows.iter().enumerate();
    rows.map(|(index, row)| QueryRow {
        stream: (index < plan.real_rows).then(|| (row.request.clone(), row.label.clone())),
        q_len: row.q_len,
    })
    .collect()
}

/// The rows that a step brings, label by label, each padded to the bucket.
pub(super) fn of_step(
    queries: &[Segment],
    bucket: Option<PaddedShape>,
    resource: &ResourceName,
) -> Result<Vec<(Label, Vec<QueryRow>)>> {
    let mut labels: Vec<(Label, Vec<QueryRow>)> = Vec::new();
    for segment in queries {
        let at = labels.iter().position(|(label, _)| *label == segment.label).unwrap_or_else(|| {
            labels.push((segment.label.clone(), Vec::new()));
            labels.len() - 1
        });
        let stream = Some((segment.request.clone(), segment.label.clone()));
        labels[at].1.push(QueryRow { stream, q_len: segment.span });
    }
    if let Some(shape) = bucket {
        for (label, rows) in &mut labels {
            let real = PaddedShape { rows: rows.len(), tokens: rows.iter().map(|row| row.q_len).sum() };
            let Some(padding) = padded_q_lens(shape, real) else {
                let why = format!(
                    "{} query rows of {} tokens ({label}) do not fit a bucket of {} rows and {} tokens",
                    real.rows, real.tokens, shape.rows, shape.tokens
                );
                return Err(Error::Step { resource: resource.clone(), why });
            };
            rows.extend(padding.into_iter().map(|q_len| QueryRow { stream: None, q_len }));
        }
    }
    Ok(labels)
}

/// Contexts by request: the plan and the row that read each.
pub(super) struct Contexts<'a> {
    by_request: HashMap<&'a RequestId, Vec<(&'a KvPlan, usize)>>,
    resource: &'a ResourceName,
}

impl<'a> Contexts<'a> {
    /// The contexts that a step reads. A stream that a group of labels names again counts once.
    pub(super) fn new(plans: &'a [Arc<KvPlan>], resource: &'a ResourceName) -> Contexts<'a> {
        let mut by_request: HashMap<&RequestId, Vec<(&KvPlan, usize)>> = HashMap::new();
        for plan in plans {
            for (index, row) in plan.rows[..plan.real_rows].iter().enumerate() {
                let found = by_request.entry(&row.request).or_default();
                if !found.iter().any(|(plan, index)| plan.rows[*index].label == row.label) {
                    found.push((plan, index));
                }
            }
        }
        Contexts { by_request, resource }
    }

    /// The context of a stream: the one of its own label, else the request's only one.
    fn find(&self, request: &RequestId, label: &Label) -> Result<(&'a KvPlan, usize)> {
        let found = match planted("cross-context-of-another") {
            true => self.by_request.iter().min_by_key(|(other, _)| **other).map(|(_, found)| found),
            false => self.by_request.get(request),
        };
        let found = found.map_or(&[][..], Vec::as_slice);
        let own = found.iter().find(|(plan, index)| plan.rows[*index].label == *label);
        match (own, found) {
            (Some(context), _) | (None, [context]) => Ok(*context),
            (None, []) => {
                let why =
                    format!("request {request} reads no context; declare a segment of span 0 for its stream");
                Err(Error::Step { resource: self.resource.clone(), why })
            }
            (None, several) => {
                let labels: Vec<&str> =
                    several.iter().map(|(plan, index)| plan.rows[*index].label.as_str()).collect();
                let why = format!(
                    "request {request} reads the contexts {}, and none is called {label} like its queries",
                    labels.join(", ")
                );
                Err(Error::Step { resource: self.resource.clone(), why })
            }
        }
    }

    /// The arrays of `rows`, each over its request's context; padding sees none.
    pub(super) fn under(&self, rows: &[QueryRow]) -> Result<Arrays<'static>> {
        let (mut qo_indptr, mut kv_indptr, mut kv_indices, mut last) =
            (vec![0], vec![0], Vec::new(), Vec::new());
        let mut arrays = Arrays::default();
        for row in rows {
            let tokens = qo_indptr.last().copied().unwrap_or(0) as usize + row.q_len;
            qo_indptr.push(i32::try_from(tokens).map_err(|_| Error::Step {
                resource: self.resource.clone(),
                why: format!("{tokens} query tokens do not fit the 32-bit arrays of a plan"),
            })?);
            let (mut kv_len, mut last_len, mut offset, mut start) = (0, 0, 0, 0);
            if let Some((request, label)) = &row.stream {
                let (plan, index) = self.find(request, label)?;
                kv_indices.extend_from_slice(plan.pages(index));
                let context = &plan.rows[index];
                kv_len = context.kv_len as i32;
                last_len = plan.kv_last_page_len[index];
                (offset, start) = (context.kv_offset as i64, context.page_start as i32);
            }
            kv_indptr.push(kv_indices.len() as i32);
            last.push(last_len);
            arrays.kv_len.push(kv_len);
            arrays.kv_offset.push(offset);
            arrays.page_start.push(start);
        }
        arrays.qo_indptr = qo_indptr.into();
        arrays.kv_indptr = kv_indptr.into();
        arrays.kv_indices = kv_indices.into();
        arrays.kv_last_page_len = last.into();
        Ok(arrays)
    }
}
