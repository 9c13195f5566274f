//! Dense attention against its oracle, and against itself to the last bit.

mod batch;
mod exact;
mod faults;
mod oracle;
