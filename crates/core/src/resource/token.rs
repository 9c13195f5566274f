//! The owned tokens of a step's life. A token in hand is a step in that state; there is no other way to be in it.
//!
//! [`AdmittedStep`] becomes [`PlannedStep`] by `Engine::plan`, which `Engine::commit` or `Engine::abort` consumes.
//! A token that is merely dropped, by an early return or a panic, is rolled back like an aborted one:
//! nothing it reserved is lost.

use std::fmt;
use std::sync::Arc;

use mstar_kernels::Stream;

use super::StepContext;
use super::engine::Shared;
use crate::graph::Lease;
use crate::{Forward, Label, Slot, Step, StepSerial};

/// What every token carries. Its drop is the roll-back.
pub(super) struct Held {
    pub(super) shared: Arc<Shared>,
    pub(super) step: Arc<Step>,
    pub(super) cx: StepContext,
    pub(super) lease: Option<Lease>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shared.roll_back(self.cx.serial);
    }
}

macro_rules! token {
    ($(#[$doc:meta])* $must:literal $token:ident) => {
        $(#[$doc])*
        #[must_use = $must]
        pub struct $token(pub(super) Box<Held>);

        impl $token {
            /// The step's number.
            pub fn serial(&self) -> StepSerial {
                self.0.cx.serial
            }

            /// The buffer set that its plans live in.
            pub fn slot(&self) -> Slot {
                self.0.cx.slot
            }

            /// What was declared.
            pub fn step(&self) -> &Arc<Step> {
                &self.0.step
            }

            /// Its hold on a captured shape, if it runs in one.
            pub fn lease(&self) -> Option<&Lease> {
                self.0.lease.as_ref()
            }
        }

        impl fmt::Debug for $token {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($token))
                    .field("serial", &self.0.cx.serial.0)
                    .field("slot", &self.0.cx.slot.0)
                    .field("walk", &self.0.step.walk)
                    .field("lease", &self.0.lease)
                    .finish()
            }
        }
    };
}
token! {
    /// A step that every resource has reserved for. Dropped, it is rolled back.
    "plan it, or abort it; a dropped step is rolled back" AdmittedStep
}
token! {
    /// A step whose plans are made and whose layers may run. Dropped, it is rolled back.
    "commit it, or abort it; a dropped step is rolled back" PlannedStep
}
token! {
    /// A step planned while the one before it runs. Its layers may not run until it is promoted. Dropped, it is cleared.
    "promote it, or clear it; a dropped preplan is cleared" PreplannedStep
}

impl PlannedStep {
    /// A cursor over one plan label of the step, at layer 0.
    pub fn forward<'a>(&'a self, label: impl Into<Label>, stream: &'a Stream) -> Forward<'a> {
        let cx = &self.0.cx;
        let plan = crate::PlanId { slot: cx.slot, label: label.into(), serial: cx.serial };
        Forward::new(plan, stream, self.0.shared.observer())
    }
}
