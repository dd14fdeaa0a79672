//! Who may touch a piece of the region: a [`ChunkMut`] while it is written, [`MemoryObj`]s from then on.
//!
//! ```text
//! reserve → ChunkMut (one writer, unpublished) → commit → MemoryObj (shared, immutable) → last drop → free
//!                     └ dropped: the bytes go back, the entry was never there
//! ```
//!
//! The bytes of an object go back by themselves when its last handle is dropped; there is no count to keep.

#[cfg(not(lmcache_loom))]
use std::any::Any;
use std::fmt;
use std::ptr;
use std::slice;
#[cfg(not(lmcache_loom))]
use std::sync::OnceLock;

use lmcache_core::extent::Extent;
use lmcache_core::hot_cache::IndexKey;

use crate::local_cpu::Ticket;
#[cfg(not(lmcache_loom))]
use crate::mapped::Mapped;
use crate::region::Region;
use crate::sync::{self, Arc, AtomicU32, Mutex, Ordering, Weak};

/// Where in its region a chunk lies, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Of the first byte.
    pub offset: u64,
    /// How many there are.
    pub len: u64,
}

/// The region and the extents that came back since the store last looked.
///
/// Extents come back on a list of their own, under a lock of their own that is held for one push and
/// taken inside no other: a handle may be dropped anywhere, by any thread.
#[derive(Debug)]
pub(crate) struct Bank {
    /// Dropped first: what is said of the memory ends before the memory.
    #[cfg(not(lmcache_loom))]
    pub(crate) attached: OnceLock<Box<dyn Any + Send + Sync>>,
    pub(crate) region: Region,
    returned: Mutex<Vec<Extent>>,
}

impl Bank {
    pub(crate) fn new(region: Region) -> Self {
        Self {
            #[cfg(not(lmcache_loom))]
            attached: OnceLock::new(),
            region,
            returned: Mutex::new(Vec::new()),
        }
    }

    pub(crate) fn take_returned(&self) -> Vec<Extent> {
        std::mem::take(&mut *self.returned.lock())
    }
}

/// Sole ownership of an extent; given back when dropped.
struct Piece {
    bank: Arc<Bank>,
    extent: Extent,
    len: usize,
}

impl Piece {
    /// Where the bytes lie, for a read that comes now.
    fn read_ptr(&self) -> *const u8 {
        self.bank.region.read_ptr(self.extent.offset, self.len)
    }

    /// Where the bytes lie, for a write that comes now.
    fn write_ptr(&mut self) -> *mut u8 {
        self.bank.region.write_ptr(self.extent.offset, self.len)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if self.extent.len > 0 {
            self.bank.returned.lock().push(self.extent);
        }
    }
}

/// A chunk being written: one owner, invisible to everybody else.
///
/// Dropping it gives the bytes back and withdraws the reservation.
pub struct ChunkMut {
    // Dropped first, so that the entry is gone before its bytes are free.
    ticket: Option<Ticket>,
    piece: Piece,
    positions: Option<Box<Positions>>,
    num_tokens: u32,
}

/// One pointer wide where there are none: most chunks have none, and there may be a million of them.
struct Positions(Box<[i64]>);

impl ChunkMut {
    pub(crate) fn new(bank: Arc<Bank>, extent: Extent, len: usize, ticket: Option<Ticket>) -> Self {
        Self {
            ticket,
            piece: Piece { bank, extent, len },
            positions: None,
            num_tokens: 0,
        }
    }

    /// The bytes to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the store carved the extent from this region. The piece owns it alone, `&mut self` makes this borrow exclusive, and the bank
        // keeps the mapping alive. Touched pages are initialised memory.
        unsafe { slice::from_raw_parts_mut(self.piece.write_ptr(), self.piece.len) }
    }

    /// The pool's memory that the bytes are part of.
    #[cfg(not(lmcache_loom))]
    pub fn mapped(&self) -> Mapped {
        Mapped::new(&self.piece.bank)
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.piece.len
    }

    /// Whether the chunk holds no byte.
    pub fn is_empty(&self) -> bool {
        self.piece.len == 0
    }

    /// Makes the chunk end after `len` bytes, if it is longer. It keeps its pages.
    pub fn truncate(&mut self, len: usize) {
        self.piece.len = self.piece.len.min(len);
    }

    /// Notes the positions of the chunk's tokens in their prompt; they stay with the chunk. Kept on the heap,
    /// 8 bytes a token.
    pub fn set_positions(&mut self, positions: Box<[i64]>) {
        self.positions = Some(Box::new(Positions(positions)));
    }

    /// The positions that were set.
    pub fn positions(&self) -> Option<&[i64]> {
        self.positions.as_deref().map(|positions| &*positions.0)
    }

    /// Notes how many tokens the chunk holds, for whoever hears of its coming and going.
    pub fn set_num_tokens(&mut self, num_tokens: usize) {
        self.num_tokens = u32::try_from(num_tokens).unwrap_or(u32::MAX);
    }

    /// Whether `bank` gave the bytes: only there may they be published, and go back to.
    pub(crate) fn is_of(&self, bank: &Weak<Bank>) -> bool {
        ptr::eq(Arc::as_ptr(&self.piece.bank), bank.as_ptr())
    }

    /// Gives up the reservation, if there is one; must not be called under the store's lock.
    pub(crate) fn withdraw(&mut self) {
        self.ticket = None;
    }

    /// Seals the bytes without publishing them under a key: shared from here on, and found by nobody.
    pub fn seal_unpublished(mut self) -> MemoryObj {
        self.withdraw();
        self.seal(None)
    }

    /// Seals the bytes: from here on they are shared and never change.
    pub(crate) fn seal(self, key: Option<IndexKey>) -> MemoryObj {
        MemoryObj(Arc::new(Sealed {
            piece: self.piece,
            positions: self.positions,
            key,
            waiting: AtomicU32::new(0),
            num_tokens: self.num_tokens,
        }))
    }

    /// Seals a reserved chunk under its own key.
    pub(crate) fn seal_reserved(mut self) -> (Option<Ticket>, MemoryObj) {
        let ticket = self.ticket.take();
        let key = ticket.as_ref().map(|ticket| ticket.key);
        (ticket, self.seal(key))
    }
}

impl fmt::Debug for ChunkMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkMut")
            .field("extent", &self.piece.extent)
            .finish_non_exhaustive()
    }
}

/// In this order, so that all a lookup reads or counts lies with the count of handles, in one cache line or two.
#[repr(C)]
struct Sealed {
    /// Lookups that hold the object for a request not yet allocated. Only for the share such leases may
    /// take of the pool; what may be evicted is decided by sole ownership alone.
    waiting: AtomicU32,
    /// In what would be padding.
    num_tokens: u32,
    piece: Piece,
    key: Option<IndexKey>,
    positions: Option<Box<Positions>>,
}

/// A ref-counted, immutable view of a stored chunk. Holding one is a lease: the bytes stay.
#[derive(Clone)]
pub struct MemoryObj(Arc<Sealed>);

impl MemoryObj {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        let piece = &self.0.piece;
        // SAFETY: the store carved the extent from this region, which the bank keeps alive, and sealed
        // bytes are never written again: the only writer gave up its `ChunkMut`, and the
        // extent goes to another one only after the last handle, this one included, is dropped.
        unsafe { slice::from_raw_parts(piece.read_ptr(), piece.len) }
    }

    /// The pool's memory that the bytes are part of.
    #[cfg(not(lmcache_loom))]
    pub fn mapped(&self) -> Mapped {
        Mapped::new(&self.0.piece.bank)
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.0.piece.len
    }

    /// Whether the object holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the bytes are, for whoever has mapped the same region.
    pub fn place(&self) -> Place {
        Place {
            offset: self.0.piece.extent.offset,
            len: self.len() as u64,
        }
    }

    /// Positions of the chunk's tokens in their prompt, where its writer set them.
    pub fn positions(&self) -> Option<&[i64]> {
        self.0.positions.as_deref().map(|positions| &*positions.0)
    }

    /// Handles that share the object now, the store's own included.
    pub fn ref_count(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// Tokens in the chunk; 0 where its writer did not say.
    pub fn num_tokens(&self) -> u32 {
        self.0.num_tokens
    }

    pub(crate) fn key(&self) -> Option<&IndexKey> {
        self.0.key.as_ref()
    }

    /// Whether `bank` gave the bytes.
    pub(crate) fn is_of(&self, bank: &Weak<Bank>) -> bool {
        ptr::eq(Arc::as_ptr(&self.0.piece.bank), bank.as_ptr())
    }

    pub(crate) fn extent(&self) -> Extent {
        self.0.piece.extent
    }

    /// Bytes of the region the object occupies.
    pub(crate) fn extent_bytes(&self) -> u64 {
        self.0.piece.extent.len
    }

    /// Whether nobody else holds the object. `Arc::get_mut`, not a count: it synchronises with the drop of
    /// the last other handle, so that reuse of the bytes comes after every read through it.
    pub(crate) fn is_sole_owner(&mut self) -> bool {
        sync::is_sole_owner(&mut self.0)
    }

    /// Takes the extent of an object that nobody else holds.
    pub(crate) fn into_extent(self) -> Option<Extent> {
        let mut sealed = sync::into_inner(self.0)?;
        let nothing = Extent { offset: 0, len: 0 };
        Some(std::mem::replace(&mut sealed.piece.extent, nothing))
    }

    /// Counts one more lookup that holds the object; true if it is the first.
    pub(crate) fn begin_waiting(&self) -> bool {
        self.0.waiting.fetch_add(1, Ordering::Relaxed) == 0
    }

    /// Counts one lookup less; true if it was the last.
    pub(crate) fn end_waiting(&self) -> bool {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed) == 1
    }

    pub(crate) fn is_waited_for(&self) -> bool {
        self.0.waiting.load(Ordering::Relaxed) > 0
    }
}

impl fmt::Debug for MemoryObj {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryObj")
            .field("extent", &self.0.piece.extent)
            .field("key", &self.0.key)
            .finish_non_exhaustive()
    }
}
