//! Block-mask attention against its oracle and plain loops, and against itself to the last bit.

mod batch;
mod exact;
mod faults;
mod masks;
mod oracle;
mod ring;
