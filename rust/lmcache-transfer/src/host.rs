//! Copies in host memory. All unsafe code that touches an engine's KV on the host is in this file.

use std::any::Any;
use std::fmt;
use std::ptr;

use lmcache_core::layout::{CopyPlan, PagedLayout};

use crate::error::TransferError;

/// An engine's paged KV cache in host memory: one base address a layer, one layout for all.
///
/// Holds whatever keeps the memory alive (the engine's tensors), so that addresses stay valid as long as
/// the value does.
pub struct PagedCache {
    bases: Vec<*mut u8>,
    layout: PagedLayout,
    num_blocks: usize,
    _keep_alive: Box<dyn Any + Send + Sync>,
}

// SAFETY: the addresses point to memory that `_keep_alive` owns. The engine promises (vLLM's connector
// contract; the library API's documentation) that it neither reads the blocks a load writes nor writes the
// blocks a save reads while the call runs, so access from another thread races with nobody.
unsafe impl Send for PagedCache {}
// SAFETY: as above; `&PagedCache` gives out no reference into the memory.
unsafe impl Sync for PagedCache {}

impl PagedCache {
    /// Registers `layers` (address, bytes) of `num_blocks` blocks each.
    ///
    /// # Safety
    /// Each address must be valid for reads and writes of its bytes until `keep_alive` is dropped, and the
    /// engine must leave the blocks named in a copy alone while the copy runs.
    pub unsafe fn new(
        layers: &[(usize, usize)],
        layout: PagedLayout,
        num_blocks: usize,
        keep_alive: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, TransferError> {
        if layers.is_empty() {
            return Err(TransferError::NoLayers);
        }
        for (layer, &(address, len)) in layers.iter().enumerate() {
            if address == 0 {
                return Err(TransferError::NullLayer { layer });
            }
            layout.validate(num_blocks, len)?;
        }
        let bases = layers
            .iter()
            .map(|&(address, _)| address as *mut u8)
            .collect();
        Ok(Self {
            bases,
            layout,
            num_blocks,
            _keep_alive: keep_alive,
        })
    }

    /// How each layer lies in memory.
    pub fn layout(&self) -> &PagedLayout {
        &self.layout
    }

    /// Blocks of each layer.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Registered layers.
    pub fn num_layers(&self) -> usize {
        self.bases.len()
    }

    /// Bytes that a chunk of `num_tokens` takes in the stored form, over all layers.
    pub fn chunk_bytes(&self, num_tokens: usize) -> Result<usize, TransferError> {
        let layer_bytes = self.layout.layer_bytes(num_tokens)?;
        layer_bytes
            .checked_mul(self.num_layers())
            .ok_or(TransferError::ChunkTooLarge {
                num_tokens,
                layer_bytes,
                num_layers: self.num_layers(),
            })
    }

    /// Copies one layer out of the cache; `chunk` is that layer's part of the stored form.
    pub(crate) fn gather(&self, layer: usize, plan: &CopyPlan, chunk: &mut [u8]) {
        let base = self.bases[layer];
        for run in &plan.runs {
            let target = &mut chunk[run.chunk..run.chunk + run.len];
            // SAFETY: the plan was built for this layout and `num_blocks`, and `new` checked that all of
            // these blocks lie inside the layer's memory, which `_keep_alive` keeps; the engine leaves the
            // blocks alone meanwhile. The target is ours alone, so the two do not overlap.
            unsafe { ptr::copy_nonoverlapping(base.add(run.paged), target.as_mut_ptr(), run.len) };
        }
    }

    /// Copies one layer into the cache; `chunk` is that layer's part of the stored form.
    pub(crate) fn scatter(&self, layer: usize, plan: &CopyPlan, chunk: &[u8]) {
        let base = self.bases[layer];
        for run in &plan.runs {
            let source = &chunk[run.chunk..run.chunk + run.len];
            // SAFETY: bounds and life as in `gather`. The source is sealed and held by the caller, so it
            // does not change; no other thread reads or writes these blocks until the call returns.
            unsafe { ptr::copy_nonoverlapping(source.as_ptr(), base.add(run.paged), run.len) };
        }
    }
}

impl fmt::Debug for PagedCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagedCache")
            .field("num_layers", &self.bases.len())
            .field("num_blocks", &self.num_blocks)
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}
