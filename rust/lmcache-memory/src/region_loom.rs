//! The region as loom sees it: plain memory, and beside each page a cell that notices every read and write.
//!
//! A write that does not come after every earlier read of the page, by the rules of the memory model, ends
//! the run with a report; so does a read that does not come after the last write.

use std::ptr::NonNull;

use loom::cell::UnsafeCell;

use crate::error::MemoryError;

/// Granularity of the region and of everything carved from it, in bytes.
pub const PAGE_BYTES: usize = 64;

/// A piece of memory whose pages are watched.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    pages: Vec<UnsafeCell<()>>,
}

// SAFETY: as the mapped region; the cells end the run where two threads meet.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Takes `asked` bytes, rounded down to whole pages.
    pub fn new(asked: u64) -> Result<Self, MemoryError> {
        let len = (asked - asked % PAGE_BYTES as u64) as usize;
        if len == 0 {
            return Err(MemoryError::TooSmall { asked });
        }
        let memory = Box::leak(vec![0u8; len].into_boxed_slice());
        let pages = (0..len / PAGE_BYTES).map(|_| UnsafeCell::new(())).collect();
        let base = NonNull::new(memory.as_mut_ptr()).expect("a box is somewhere");
        Ok(Self { base, len, pages })
    }

    /// Bytes in the region.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the region holds no byte; it never does.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn read_ptr(&self, offset: u64, len: usize) -> *const u8 {
        for page in self.pages(offset, len) {
            page.with(|_| ());
        }
        self.base.as_ptr().wrapping_add(offset as usize)
    }

    pub(crate) fn write_ptr(&self, offset: u64, len: usize) -> *mut u8 {
        for page in self.pages(offset, len) {
            page.with_mut(|_| ());
        }
        self.base.as_ptr().wrapping_add(offset as usize)
    }

    fn pages(&self, offset: u64, len: usize) -> &[UnsafeCell<()>] {
        let first = offset as usize / PAGE_BYTES;
        &self.pages[first..(offset as usize + len).div_ceil(PAGE_BYTES)]
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let memory = std::ptr::slice_from_raw_parts_mut(self.base.as_ptr(), self.len);
        // SAFETY: the box that was leaked in `new`; every extent carved from it holds the region.
        drop(unsafe { Box::from_raw(memory) });
    }
}
