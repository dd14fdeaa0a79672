//! Host bytes and their lifetime, and the L1 store under one lock.
//!
//! [`region::Region`] owns the memory, [`object`] says who may write or read a piece of it, and
//! [`local_cpu::LocalCpu`] is the store: index, free extents and leases behind one mutex, with batched verbs. What comes and goes is told
//! to an [`events::EventSink`], if anybody listens. Other processes of the host may read a pool that was made for
//! it: [`mapped::Keeper`].

pub mod error;
pub mod events;
mod lease;
pub mod local_cpu;
#[cfg(not(lmcache_loom))]
pub mod mapped;
pub mod object;
#[cfg_attr(lmcache_loom, path = "region_loom.rs")]
pub mod region;
mod sync;

#[cfg(lmcache_loom)]
pub use self::sync::Mutant;
