//! The policies by name, and what each of them has to answer.

use super::arc::AdaptiveReplacement;
use super::fifo::Fifo;
use super::ghost::Ghosts;
use super::lfu::Lfu;
use super::lru::Lru;
use super::mru::Mru;
use super::s3_fifo::S3Fifo;
use super::slab::{FIRST, Slab};

/// Which entry leaves when memory is full.
///
/// Under every policy a chunk leaves before the chunks it depends on, as long as chains are stored and
/// looked up from their first chunk on and nobody holds a part of one: a lookup of `[a, b]` counts as a use
/// of `a` no older and no rarer than that of `b`, and each policy keeps that order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Policy {
    /// Adaptive replacement: balances entries seen once against those seen again, by what it regrets.
    Arc,
    /// The entry stored longest ago. One is as young as the youngest entry stored behind it in its chain.
    Fifo,
    /// The entry looked up least often; of equals, the one not used for longest.
    Lfu,
    /// The entry not used for longest.
    #[default]
    Lru,
    /// The entry used last that no other depends on.
    Mru,
    /// A small queue for entries never looked up, a main one for the others; both first in, first out.
    S3Fifo,
}

impl Policy {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Lru,
        Self::Lfu,
        Self::Fifo,
        Self::Mru,
        Self::S3Fifo,
        Self::Arc,
    ];

    /// The name that settings use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Arc => "ARC",
            Self::Fifo => "FIFO",
            Self::Lfu => "LFU",
            Self::Lru => "LRU",
            Self::Mru => "MRU",
            Self::S3Fifo => "S3FIFO",
        }
    }

    /// Reads a name, in any case.
    pub fn from_name(name: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|policy| policy.name().eq_ignore_ascii_case(name))
    }
}

/// How a walk along a chain counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// A lookup for a request: counts as a use.
    Use,
    /// The same request asks again, or stores behind what it uses: refreshes, and counts nothing.
    Refresh,
}

/// The order in which entries leave. A policy moves entries between its lists and knows no value.
///
/// Entries under [`super::slab::HELD`] were set aside because somebody holds them; a walk may bring them
/// back. Where a policy says "behind", it means farther from leaving.
pub(super) trait Order {
    /// Gives a published entry its place. `fingerprint` names its key.
    fn enter<V>(&mut self, slab: &mut Slab<V>, at: u32, fingerprint: u64, num_resident: usize);

    /// A chain is walked: `chain` holds its published entries, head first, each stamped already.
    fn walk<V>(&mut self, slab: &mut Slab<V>, chain: &[u32], access: Access);

    /// The entry to leave next, among those that the current batch has not touched.
    fn candidate<V>(&mut self, slab: &mut Slab<V>, num_resident: usize) -> Option<u32>;

    /// The list an evicted entry is put back to, at the end that leaves next.
    fn home(&self, flags: u8, mark: u32) -> u16;

    /// Keys of evicted entries that the policy remembers.
    fn ghosts(&mut self) -> Option<&mut Ghosts> {
        None
    }

    /// The list of [`Order::ghosts`] that remembers an entry with these flags.
    fn ghost_list(&self, _flags: u8) -> usize {
        0
    }
}

/// One of the policies at work.
#[derive(Debug)]
pub(super) enum AnyOrder {
    Arc(AdaptiveReplacement),
    Fifo(Fifo),
    Lfu(Lfu),
    Lru(Lru),
    Mru(Mru),
    S3Fifo(S3Fifo),
}

impl AnyOrder {
    pub(super) fn new(policy: Policy) -> Self {
        match policy {
            Policy::Arc => Self::Arc(AdaptiveReplacement::default()),
            Policy::Fifo => Self::Fifo(Fifo),
            Policy::Lfu => Self::Lfu(Lfu::default()),
            Policy::Lru => Self::Lru(Lru),
            Policy::Mru => Self::Mru(Mru),
            Policy::S3Fifo => Self::S3Fifo(S3Fifo::default()),
        }
    }

    /// Lists that the policy keeps.
    pub(super) fn num_lists(&self) -> u16 {
        FIRST
            + match self {
                Self::Fifo(_) | Self::Lru(_) | Self::Mru(_) => 1,
                Self::Arc(_) | Self::S3Fifo(_) => 2,
                Self::Lfu(_) => Lfu::NUM_LISTS,
            }
    }
}

macro_rules! each {
    ($order:expr, $inner:ident => $call:expr) => {
        match $order {
            AnyOrder::Arc($inner) => $call,
            AnyOrder::Fifo($inner) => $call,
            AnyOrder::Lfu($inner) => $call,
            AnyOrder::Lru($inner) => $call,
            AnyOrder::Mru($inner) => $call,
            AnyOrder::S3Fifo($inner) => $call,
        }
    };
}

impl Order for AnyOrder {
    fn enter<V>(&mut self, slab: &mut Slab<V>, at: u32, fingerprint: u64, num_resident: usize) {
        each!(self, order => order.enter(slab, at, fingerprint, num_resident));
    }

    fn walk<V>(&mut self, slab: &mut Slab<V>, chain: &[u32], access: Access) {
        each!(self, order => order.walk(slab, chain, access));
    }

    fn candidate<V>(&mut self, slab: &mut Slab<V>, num_resident: usize) -> Option<u32> {
        each!(self, order => order.candidate(slab, num_resident))
    }

    fn home(&self, flags: u8, mark: u32) -> u16 {
        each!(self, order => order.home(flags, mark))
    }

    fn ghosts(&mut self) -> Option<&mut Ghosts> {
        each!(self, order => order.ghosts())
    }

    fn ghost_list(&self, flags: u8) -> usize {
        each!(self, order => order.ghost_list(flags))
    }
}
