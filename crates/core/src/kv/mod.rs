//! Paged KV caches: what they are made of, what a plan of one says, and what a backend sees of one.
//!
//! A [`PagedStore`] is memory (`memory`: the bytes of every plane) and a ledger behind one lock: who owns
//! which page (`page_pool`), which pages a stream lists (`stream`, `page_table`), which content the index
//! knows (`prefix`), and what the outstanding steps have reserved (`reserve`, `settle`). A step works on copies of
//! the streams it touches, on top of what the step before it will leave; so a step may be planned while
//! another runs, and undoing one is forgetting the copies and releasing what was claimed.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `config` | geometry, its checks, bytes, shards |
//! | `memory` | the planes' bytes; addresses; the only unsafe code |
//! | `page_pool` | free list, owner counts, seals |
//! | `page_table`, `stream` | a stream's pages, length, generation, first kept token |
//! | `prefix` | page keys, the index, matching and offering |
//! | `ledger` | all bookkeeping, under the store's lock |
//! | `reserve`, `settle` | admission; commit, rollback, promotion |
//! | `gate` | copies before writes, writes before the end |
//! | `plan` | packed rows and page tables |
//! | `requests`, `offload` | ingest, reset, remove; to the host and back |
//! | `ring` | a cache that is overwritten in place, frame by frame |
//! | `events`, `stats` | what happened, and how much |
//! | `store`, `resource`, `view` | the store, the resource over it, and what backends see |

mod config;
mod events;
mod gate;
mod ledger;
mod memory;
mod offload;
mod page_pool;
mod page_table;
mod plan;
mod prefix;
mod requests;
mod reserve;
mod resource;
mod ring;
mod settle;
mod slots;
mod stats;
mod store;
mod stream;
mod view;

pub use config::{KvConfig, KvLayout, PlaneConfig, SCALES, SINK_PAGE};
pub use events::KvEvent;
pub use memory::page_offset;
pub use page_pool::{PageError, PageId, PagePool, Released};
pub use plan::{KvPlan, KvRow};
pub use prefix::{Namespace, PageHash, PageKey};
pub use reserve::PageNeed;
pub use resource::PagedKvCache;
pub use ring::{
    Phase, RING_BLOCK, RingBlocks, RingCache, RingConfig, RingGeometry, RingGroups, RingKv, RingLayer,
    RingPlan, RingRow, RingView, VisibleFrames, WorldSnapshot,
};
pub use stats::{KvStats, StreamState};
pub use store::PagedStore;
pub use view::{KvEntries, LayerView, PagedKv};
