use std::sync::{Arc, Mutex};

use super::*;
use crate::resource::{Fingerprint, Ingest, Outcome, PaddedShape, Promotion, Refusal, StepContext};
use crate::{RefusalReason, Resource, ResourceName, StepSerial};

/// Remembers requests, the largest buffers asked for, and forgets nothing it is not told to.
#[derive(Debug, Default)]
struct Keeper {
    requests: Mutex<Vec<RequestId>>,
    largest: Mutex<(usize, usize)>,
    planned: Mutex<Vec<(usize, PaddedShape)>>,
    leaks: bool,
    refuses: bool,
}

impl Keeper {
    fn label() -> ResourceName {
        "keeper".into()
    }
}

impl Resource for Keeper {
    fn name(&self) -> &ResourceName {
        static NAME: std::sync::OnceLock<ResourceName> = std::sync::OnceLock::new();
        NAME.get_or_init(Keeper::label)
    }

    fn depends_on(&self) -> Vec<ResourceName> {
        vec![]
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        None
    }

    fn ingest_request(&self, ingest: &Ingest) -> Result<()> {
        self.requests.lock().unwrap().push(ingest.request.clone());
        Ok(())
    }

    fn admit(&self, _: &StepContext, _: &Step) -> Result<Outcome> {
        if self.refuses {
            let reason = RefusalReason::NoBucket { rows: 0, tokens: 0 };
            return Ok(Outcome::Refused(Refusal { resource: Keeper::label(), reason }));
        }
        Ok(Outcome::Admitted)
    }

    fn rollback(&self, _: StepSerial) {}

    fn plan(&self, cx: &StepContext, _: &Step) -> Result<()> {
        self.planned.lock().unwrap().push((cx.slot.0, cx.bucket.unwrap()));
        Ok(())
    }

    fn promote(&self, _: &StepContext, _: &Step) -> Result<Promotion> {
        Ok(Promotion::Valid)
    }

    fn commit(&self, _: StepSerial, _: &Step) -> Result<()> {
        Ok(())
    }

    fn reset_request(&self, _: &RequestId, _: bool) -> Result<()> {
        Ok(())
    }

    fn remove_request(&self, request: &RequestId) -> Result<()> {
        if !self.leaks {
            self.requests.lock().unwrap().retain(|r| r != request);
        }
        Ok(())
    }

    fn build_accelerator_graph_buffers(&self, slots: usize, shape: PaddedShape) -> Result<()> {
        let mut largest = self.largest.lock().unwrap();
        *largest = (largest.0.max(slots), largest.1.max(shape.tokens));
        Ok(())
    }

    fn tracked_requests(&self) -> Vec<RequestId> {
        self.requests.lock().unwrap().clone()
    }
}

fn warm(keeper: Keeper, run: impl FnMut(&PlannedStep) -> Result<()>) -> (Arc<Keeper>, Result<()>) {
    let keeper = Arc::new(keeper);
    let engine = Engine::new(vec![Arc::clone(&keeper) as Arc<dyn Resource>]).unwrap();
    let buckets = Buckets::decode("decode", &[1, 4]);
    let declare = |bucket: &Bucket, rows: &[(RequestId, usize)]| {
        let q_len = usize::from(bucket.shape.rows == 1);
        assert!(rows.len() == 1 && rows[0].0.is_dummy() && rows[0].1 == q_len);
        Step::new(bucket.walk.clone())
    };
    let outcome = warm_up(&engine, &buckets, declare, run);
    assert_eq!(engine.outstanding(), 0);
    (keeper, outcome)
}

#[test]
fn every_bucket_runs_once_in_every_slot_and_leaves_nothing() {
    let mut ran = 0;
    let (keeper, outcome) = warm(Keeper::default(), |_| {
        ran += 1;
        Ok(())
    });
    outcome.unwrap();
    assert_eq!((ran, *keeper.largest.lock().unwrap()), (4, (2, 4)));
    let shape = |rows| PaddedShape { rows, tokens: rows };
    assert_eq!(*keeper.planned.lock().unwrap(), [(0, shape(1)), (1, shape(1)), (0, shape(4)), (1, shape(4))]);
    assert!(keeper.tracked_requests().is_empty());
}

#[test]
fn a_failing_forward_and_a_refused_bucket_leave_nothing_either() {
    let fail = |_: &PlannedStep| Err(Error::Invariant("no".into()));
    let (keeper, outcome) = warm(Keeper::default(), fail);
    assert!(matches!(outcome, Err(Error::Invariant(_))) && keeper.tracked_requests().is_empty());
    let (keeper, outcome) = warm(Keeper { refuses: true, ..Default::default() }, |_| Ok(()));
    let said = outcome.unwrap_err().to_string();
    assert!(said.contains("bucket decode [1 rows, 1 tokens]"), "{said}");
    assert!(keeper.tracked_requests().is_empty());
}

#[test]
fn a_resource_that_keeps_a_dummy_is_named() {
    let (_, outcome) = warm(Keeper { leaks: true, ..Default::default() }, |_| Ok(()));
    assert!(matches!(outcome, Err(Error::DummyRequestsLeft { requests, .. }) if requests.len() == 1));
}
