//! Tables that kernels read: slots, and the addresses of chunks.

use std::ptr;
use std::sync::Arc;

use lmcache_memory::region::Region;

use crate::cuda::current::{Current, PAGE_LOCK_SLICE_BYTES};
use crate::cuda::error::CudaError;
use crate::cuda::handles::{DeviceMemory, PageLock, StreamId};

const WORD: usize = size_of::<u64>();

/// Numbers for a kernel: written in page-locked memory, copied to the device in stream order.
#[derive(Debug)]
pub(super) struct Tables {
    device: DeviceMemory,
    _lock: PageLock,
    host: Arc<Region>,
}

impl Tables {
    /// Words there is room for.
    pub(super) fn len(&self) -> usize {
        self.device.len() / WORD
    }

    /// Room for `words`, and as often more.
    pub(super) fn new(current: &Current, words: usize) -> Result<Self, CudaError> {
        let bytes = (words * WORD).next_power_of_two().max(1 << 16);
        let host = Region::new(bytes as u64).map_err(|fault| CudaError::HostMemory {
            bytes,
            reason: fault.to_string(),
        })?;
        let host = Arc::new(host);
        let base = host.base().as_ptr();
        // SAFETY: the region is mapped as long as the lock holds it.
        let lock = unsafe {
            current.page_lock(
                base,
                host.len(),
                PAGE_LOCK_SLICE_BYTES,
                Arc::clone(&host) as _,
            )
        }?;
        Ok(Self {
            device: current.device_memory(bytes)?,
            _lock: lock,
            host,
        })
    }

    /// Puts `words` where kernels on `stream` find them.
    pub(super) fn fill(
        &self,
        current: &Current,
        words: &[u64],
        stream: StreamId,
    ) -> Result<(), CudaError> {
        assert!(words.len() * WORD <= self.host.len(), "room was asked for");
        let base = self.host.base().as_ptr();
        // SAFETY: inside the region, which is this value's alone: a job takes tables out of the pool, and they
        // come back when all that was given to its stream is done. The device reads them behind this write.
        unsafe {
            ptr::copy_nonoverlapping(words.as_ptr(), base.cast(), words.len());
            current.copy(
                self.device.address(),
                base as u64,
                words.len() * WORD,
                stream,
            )
        }
    }

    /// Where a word is, for kernels.
    pub(super) fn word(&self, index: usize) -> u64 {
        self.device.address() + (index * WORD) as u64
    }
}
