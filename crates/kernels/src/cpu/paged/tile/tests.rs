//! The tile kernel against f64 loops of its own, on every instruction set of the machine.

mod exact;
mod fixture;
mod shapes;
