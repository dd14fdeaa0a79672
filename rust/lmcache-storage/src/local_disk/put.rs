//! Puts in hand: from the queue to the disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lmcache_core::hash::ChunkHash;
use lmcache_memory::object::MemoryObj;

use super::faults::{Fault, Trouble};
use super::records::{Event, Name, Record};
use super::{Shared, add, chunk_io};
use crate::backend::described;
use crate::object_form::Form;

/// Chunks put together; when the last of them is done, all are refreshed as the chain they are.
pub(super) struct Batch {
    pub(super) shared: Arc<Shared>,
    pub(super) namespace: [u8; 16],
    pub(super) hashes: Box<[ChunkHash]>,
    pub(super) number: u32,
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.shared.touch(self.namespace, &self.hashes);
    }
}

/// A put in hand. Dropping it, done or not, ends it.
pub(super) struct Put {
    pub(super) batch: Arc<Batch>,
    pub(super) name: Name,
    pub(super) namespace: Arc<str>,
    pub(super) position: u16,
    /// Its bytes; `None` if it waits by its name alone and takes them from the pool in its turn.
    pub(super) object: Option<MemoryObj>,
    pub(super) form: Option<Form>,
    pub(super) num_tokens: u32,
    pub(super) withdrawn: Arc<AtomicBool>,
}

impl Drop for Put {
    fn drop(&mut self) {
        self.batch.shared.end_put(&self.name, &self.withdrawn);
    }
}

impl Put {
    pub(super) fn run(self) {
        let shared = Arc::clone(&self.batch.shared);
        let held = self.object.clone().or_else(|| {
            let objects = shared.pool.get(&self.namespace, &[self.name.hash]);
            objects.into_iter().next()
        });
        let Some(object) = held else {
            // It has left host memory since.
            return add(&shared.counts.dropped_chunks, 1);
        };
        match self.store(&object) {
            Ok(true) => {
                add(&shared.counts.put_chunks, 1);
                add(&shared.counts.put_bytes, object.len() as u64);
            }
            Ok(false) => add(&shared.counts.refreshed_chunks, 1),
            Err(trouble) => {
                shared.faults.note("put", &trouble);
                add(&shared.counts.dropped_chunks, 1);
            }
        }
    }

    fn store(&self, object: &MemoryObj) -> Result<bool, Trouble> {
        let withdrawn = || Trouble::new(Fault::Withdrawn, "removed while it waited");
        if self.withdrawn.load(Ordering::Relaxed) {
            return Err(withdrawn());
        }
        let shared = &self.batch.shared;
        let folder = shared.folder(self.name.hash);
        let form = self.form.as_ref();
        let description = described(
            &self.namespace,
            self.name.hash,
            object,
            form,
            self.num_tokens,
        );
        let header = description.seal(object.bytes()).ok_or_else(|| {
            Trouble::new(
                Fault::Full,
                "its description is larger than a header may be",
            )
        })?;
        let record = Record {
            event: Event::Put,
            name: self.name,
            bytes: chunk_io::file_bytes(header.len(), object.len()),
            batch: self.batch.number,
            position: self.position,
        };
        let reserved = folder.reserve(record.bytes, record.batch)?;
        let temp = folder.temp_path();
        let outcome = chunk_io::write(folder, &temp, &header, object.bytes(), shared.options.sync)
            .and_then(|()| folder.publish(&temp, record, reserved, &self.withdrawn));
        if !matches!(outcome, Ok(true)) {
            let _ = folder.files.remove(&temp);
        }
        outcome
    }
}
