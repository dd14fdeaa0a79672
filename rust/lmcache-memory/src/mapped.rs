//! A pool's memory as a whole: where it is, what others say of it, and who else reads it.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use lmcache_core::hash::ChunkHash;

use crate::object::Bank;
use crate::region::ForeignChunk;

/// Another process of this host that keeps chunks for this one, too.
pub trait Keeper: fmt::Debug + Send + Sync {
    /// Asks for chunks of a chain, from its first one on: those up to the first that is not there, none of
    /// which changes or goes before [`Keeper::let_go`]. Of a lookup's lease this is one reader's share.
    ///
    /// Nothing if the keeper cannot be asked, or holds something for this lookup already.
    fn hold(&self, lookup_id: &str, namespace: &str, hashes: &[ChunkHash]) -> Vec<ForeignChunk>;

    /// Gives back what a call of [`Keeper::hold`] gave: `num_chunks`. Whether all of it was held until now;
    /// otherwise what was read of it may be anything.
    fn let_go(&self, lookup_id: &str, num_chunks: usize) -> bool;
}

/// The memory of a pool; mapped as long as this is held.
#[derive(Debug, Clone)]
pub struct Mapped(Arc<Bank>);

impl Mapped {
    pub(crate) fn new(bank: &Arc<Bank>) -> Self {
        Self(Arc::clone(bank))
    }

    /// Address of the first byte.
    pub fn base(&self) -> NonNull<u8> {
        self.0.region.base()
    }

    /// Bytes of the pool.
    pub fn len(&self) -> usize {
        self.0.region.len()
    }

    /// Whether the pool holds no byte; it never does.
    pub fn is_empty(&self) -> bool {
        self.0.region.is_empty()
    }

    /// What was said of the memory, if anything was.
    pub fn attached(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.0.attached.get().map(Box::as_ref)
    }

    /// What was said of the memory, or what `say` says of it now, for good.
    ///
    /// It ends right before the memory is unmapped, when the store is closed and the last chunk is dropped, so it
    /// may count on the memory to its own end. Whoever comes while `say` runs waits for it.
    pub fn attach_once(
        &self,
        say: impl FnOnce(&Self) -> Box<dyn Any + Send + Sync>,
    ) -> &(dyn Any + Send + Sync) {
        self.0.attached.get_or_init(|| say(self)).as_ref()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::local_cpu::LocalCpu;

    static DROPPED: AtomicUsize = AtomicUsize::new(0);

    struct Said(usize);

    impl Drop for Said {
        fn drop(&mut self) {
            // The memory is still there: else this would end the process.
            let first = self.0 as *mut u8;
            // SAFETY: mapped until this returns, and nobody else's by now.
            unsafe { first.write_volatile(7) };
            DROPPED.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn what_is_said_of_the_memory_ends_right_before_it_and_with_the_last_chunk() {
        let store = LocalCpu::new(1 << 16, Duration::from_secs(1)).expect("a pool");
        let chunk = store.allocate(&[5000]).expect("room").remove(0);
        let mapped = store.mapped().expect("open");
        assert_eq!((mapped.len(), mapped.is_empty()), (1 << 16, false));
        assert!(mapped.attached().is_none());
        let base = mapped.base().as_ptr() as usize;
        let said = |_: &Mapped| -> Box<dyn Any + Send + Sync> { Box::new(Said(base)) };
        mapped.attach_once(said);
        let again = chunk.mapped();
        let found = again.attach_once(|_| unreachable!("said once"));
        assert_eq!(found.downcast_ref::<Said>().expect("the same").0, base);
        store.close();
        assert!(store.mapped().is_none());
        drop((mapped, again));
        assert_eq!(DROPPED.load(Ordering::SeqCst), 0);
        drop(chunk);
        assert_eq!(DROPPED.load(Ordering::SeqCst), 1);
    }
}
