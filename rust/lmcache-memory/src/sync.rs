//! What threads meet through. A build with `--cfg lmcache_loom` runs the same store over loom's stand-ins,
//! which try every interleaving that matters; see `tests/loom.rs`.

#[cfg(lmcache_loom)]
pub use self::inner::Mutant;
pub(crate) use self::inner::*;

#[cfg(not(lmcache_loom))]
mod inner {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    pub(crate) use std::sync::{Arc, Weak};

    pub(crate) use parking_lot::{Mutex, MutexGuard};

    pub(crate) fn downgrade<T>(shared: &Arc<T>) -> Weak<T> {
        Arc::downgrade(shared)
    }

    pub(crate) fn into_inner<T>(shared: Arc<T>) -> Option<T> {
        Arc::into_inner(shared)
    }

    pub(crate) fn is_sole_owner<T>(shared: &mut Arc<T>) -> bool {
        Arc::get_mut(shared).is_some()
    }
}

#[cfg(lmcache_loom)]
mod inner {
    use std::cell::Cell;

    pub(crate) use loom::sync::Arc;
    pub(crate) use loom::sync::MutexGuard;
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    /// loom has no weak handles; a strong one does where nothing owns itself.
    #[derive(Debug)]
    pub(crate) struct Weak<T>(Arc<T>);

    impl<T> Weak<T> {
        pub(crate) fn upgrade(&self) -> Option<Arc<T>> {
            Some(Arc::clone(&self.0))
        }

        pub(crate) fn as_ptr(&self) -> *const T {
            Arc::as_ptr(&self.0)
        }
    }

    pub(crate) fn downgrade<T>(shared: &Arc<T>) -> Weak<T> {
        Weak(Arc::clone(shared))
    }

    pub(crate) fn into_inner<T>(shared: Arc<T>) -> Option<T> {
        Arc::try_unwrap(shared).ok()
    }

    /// A store that does not ask whether it is a chunk's sole owner before it reuses the bytes: what the
    /// proof must refuse.
    #[derive(Debug)]
    pub struct Mutant(());

    thread_local! {
        // loom's threads are coroutines of one thread of the system.
        static MUTANT: Cell<bool> = const { Cell::new(false) };
    }

    impl Mutant {
        /// Makes every store of this thread one, until it is dropped.
        pub fn begin() -> Self {
            MUTANT.set(true);
            Self(())
        }
    }

    impl Drop for Mutant {
        fn drop(&mut self) {
            MUTANT.set(false);
        }
    }

    pub(crate) fn is_sole_owner<T>(shared: &mut Arc<T>) -> bool {
        Arc::get_mut(shared).is_some() || MUTANT.get()
    }

    /// loom's mutex under the interface of parking_lot's.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("no thread panics with the lock")
        }
    }
}
