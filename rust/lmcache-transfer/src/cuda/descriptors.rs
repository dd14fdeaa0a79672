//! Descriptors for the copy engines: as few as there can be.

use lmcache_core::layout::Run;

/// One copy of a layer, between a place in the engine's layer and one in a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// From the base of the engine's layer, in bytes.
    pub paged: u64,
    /// The chunk's address, of layer 0.
    pub stored: u64,
    /// Bytes to copy.
    pub len: usize,
    /// From one layer of the chunk to the next.
    pub layer_bytes: u64,
}

/// Appends the runs of the chunk at `address`; those that are neighbours on both sides become one descriptor.
///
/// Submitting a descriptor costs the driver half a microsecond, so each one less counts.
pub fn append(
    to: &mut Vec<Descriptor>,
    address: u64,
    layer_bytes: u64,
    runs: impl Iterator<Item = Run>,
) {
    let first = to.len();
    for run in runs {
        let (paged, stored) = (run.paged as u64, address + run.chunk as u64);
        if let Some(last) = to[first..].last_mut()
            && last.paged + last.len as u64 == paged
            && last.stored + last.len as u64 == stored
        {
            last.len += run.len;
            continue;
        }
        to.push(Descriptor {
            paged,
            stored,
            len: run.len,
            layer_bytes,
        });
    }
}
