//! Bytes that the process has on its heap, as the C library lays them out.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

static COUNTS: AtomicBool = AtomicBool::new(false);
static BYTES: AtomicI64 = AtomicI64::new(0);

/// The system's allocator, counting while it is asked to.
pub(crate) struct Counting;

/// Starts to count, at zero.
pub(crate) fn count() {
    BYTES.store(0, Ordering::Relaxed);
    COUNTS.store(true, Ordering::Relaxed);
}

/// Bytes allocated and not freed since [`count`].
pub(crate) fn bytes() -> i64 {
    BYTES.load(Ordering::Relaxed)
}

/// What a request takes: a header of eight bytes, rounded up to sixteen, at least 32.
fn taken(len: usize) -> i64 {
    (len + 8).next_multiple_of(16).max(32) as i64
}

fn add(bytes: i64) {
    if COUNTS.load(Ordering::Relaxed) {
        BYTES.fetch_add(bytes, Ordering::Relaxed);
    }
}

// SAFETY: every call is handed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(taken(layout.size()));
        // SAFETY: as this function's own contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        add(-taken(layout.size()));
        // SAFETY: as this function's own contract.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        add(taken(len) - taken(layout.size()));
        // SAFETY: as this function's own contract.
        unsafe { System.realloc(memory, layout, len) }
    }
}
