//! Buckets, slots and leases of captured forwards, and their CPU twin.
