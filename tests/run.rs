//! `mstar run` as a program: specs in, report and exit code out.

#[path = "run/bits.rs"]
mod bits;
#[cfg(all(feature = "dense", feature = "paged"))]
#[path = "run/dense.rs"]
mod dense;
#[cfg(all(feature = "paged", feature = "mla", feature = "dsa"))]
#[path = "run/fp8.rs"]
mod fp8;
#[cfg(all(feature = "paged", feature = "mla", feature = "dense", feature = "flex", feature = "dsa"))]
#[path = "run/graphs.rs"]
mod graphs;
#[path = "run/hits.rs"]
mod hits;
#[path = "run/hostile.rs"]
mod hostile;
#[path = "run/output.rs"]
mod output;
#[path = "run/pages.rs"]
mod pages;
#[path = "run/program.rs"]
mod program;
#[cfg(feature = "flex")]
#[path = "run/ring.rs"]
mod ring;
#[cfg(unix)]
#[path = "run/signals.rs"]
mod signals;
#[path = "run/sparse.rs"]
mod sparse;
#[path = "run/specs.rs"]
mod specs;
