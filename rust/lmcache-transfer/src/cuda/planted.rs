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

/// Every wait by its name, each at one place of the sources.
pub const WAITS: [&str; 15] = [
    "store after engine",
    "engine after store",
    "load after engine",
    "engine after load",
    "host after copies",
    "drop after copies",
    "engine after whole store",
    "engine after whole load",
    "layer copy after engine",
    "engine after loaded layer",
    "engine after stored layers",
    "release after copies",
    "host after stream",
    "settle after landings",
    "close after landings",
];

#[cfg(not(feature = "planted-removals"))]
pub(crate) const fn left_out(_wait: &str) -> bool {
    false
}
