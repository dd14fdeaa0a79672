//! Waits that a test may leave out, to see that their absence is seen. In a build for use nothing is ever left
//! out: the feature `planted-removals` is in no wheel.

#[cfg(feature = "planted-removals")]
mod switchable {
    use std::cell::Cell;

    thread_local! {
        static LEFT_OUT: Cell<Option<&'static str>> = const { Cell::new(None) };
    }

    /// Leaves out the wait of this name in this thread.
    pub fn leave_out(wait: Option<&'static str>) {
        LEFT_OUT.set(wait);
    }

    pub(crate) fn left_out(wait: &str) -> bool {
        LEFT_OUT.get() == Some(wait)
    }
}

#[cfg(feature = "planted-removals")]
pub use switchable::leave_out;
#[cfg(feature = "planted-removals")]
pub(crate) use switchable::left_out;

/// Every wait by its name.
pub const WAITS: [&str; 5] = [
    "store after engine",
    "engine after store",
    "load after engine",
    "engine after load",
    "host after copies",
];

#[cfg(not(feature = "planted-removals"))]
pub(crate) const fn left_out(_wait: &str) -> bool {
    false
}
