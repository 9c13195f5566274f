//! The same row gives the same bits.
