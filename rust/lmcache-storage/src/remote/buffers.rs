//! Memory for values on their way in, used again: the system clears and maps each new piece, which takes as long as
//! to receive it.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;

/// Bytes that wait for their next use.
const MAX_KEPT_BYTES: usize = 64 << 20;

/// Buffers that wait for their next use. Handles share them.
#[derive(Debug, Clone, Default)]
pub(super) struct Buffers(Arc<Mutex<Vec<Vec<u8>>>>);

/// A buffer that comes back when it is dropped.
struct Lent {
    bytes: Vec<u8>,
    to: Buffers,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.to.give_back(std::mem::take(&mut self.bytes));
    }
}

impl Buffers {
    /// An empty buffer with room for so many bytes.
    pub(super) fn take(&self, len: usize) -> Vec<u8> {
        let mut kept = self.0.lock();
        // One that is far too large is for others.
        let fits = |each: &Vec<u8>| each.capacity() >= len && each.capacity() / 4 <= len;
        match kept.iter().rposition(fits) {
            Some(at) => kept.swap_remove(at),
            None => Vec::with_capacity(len),
        }
    }

    /// The buffer as bytes; it comes back with the last of them.
    pub(super) fn lend(&self, bytes: Vec<u8>) -> Bytes {
        Bytes::from_owner(Lent {
            bytes,
            to: self.clone(),
        })
    }

    fn give_back(&self, mut bytes: Vec<u8>) {
        bytes.clear();
        let mut kept = self.0.lock();
        kept.push(bytes);
        let mut held: usize = kept.iter().map(Vec::capacity).sum();
        // The oldest go: sizes change with what is read.
        while held > MAX_KEPT_BYTES && !kept.is_empty() {
            held -= kept.remove(0).capacity();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_where_it_fits_and_few_are_kept() {
        let buffers = Buffers::default();
        let mut first = buffers.take(1 << 20);
        first.extend_from_slice(b"abc");
        let at = first.as_ptr();
        let lent = buffers.lend(first);
        assert_eq!(&lent[..], b"abc");
        let part = lent.slice(1..);
        drop(lent);
        let other = buffers.take(1 << 20);
        assert_ne!(other.as_ptr(), at, "somebody holds it");
        drop(part);
        let small = buffers.take(100);
        assert_ne!(small.as_ptr(), at, "far too large");
        let again = buffers.take(1 << 19);
        assert_eq!((again.as_ptr(), again.len()), (at, 0));
        for _ in 0..10 {
            drop(buffers.lend(Vec::with_capacity(16 << 20)));
            let held: usize = buffers.0.lock().iter().map(Vec::capacity).sum();
            assert!(held <= MAX_KEPT_BYTES);
        }
        let many: Vec<Bytes> = (0..10)
            .map(|_| buffers.lend(Vec::with_capacity(16 << 20)))
            .collect();
        drop(many);
        assert_eq!(buffers.0.lock().len(), 4);
    }
}
