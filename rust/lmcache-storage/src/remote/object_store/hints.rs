//! What was seen to be there a moment ago, so that it need not be asked for again.
//!
//! Others may have removed it since, so a hint ends soon, and with the first load that finds nothing. There are no
//! hints of what is not there.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long what was there is taken to be there.
const LIFE: Duration = Duration::from_secs(10);
/// Hints that are kept; the oldest make room.
const MOST: usize = 1 << 15;

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Hints(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// When, and as which of all.
    seen: HashMap<Arc<str>, (Instant, u64)>,
    /// In their order; those that were dropped or renewed are still in it.
    order: VecDeque<(Instant, u64, Arc<str>)>,
    next: u64,
}

impl Hints {
    /// It is there now.
    pub(super) fn note(&self, name: &str) {
        self.note_at(name, Instant::now());
    }

    fn note_at(&self, name: &str, now: Instant) {
        let mut state = self.0.lock();
        let name: Arc<str> = name.into();
        let number = state.next;
        state.next += 1;
        state.seen.insert(Arc::clone(&name), (now, number));
        state.order.push_back((now, number, name));
        while let Some((at, number, oldest)) = state.order.front().cloned() {
            if state.order.len() <= MOST && now.duration_since(at) < LIFE {
                break;
            }
            if state.seen.get(&oldest) == Some(&(at, number)) {
                state.seen.remove(&oldest);
            }
            state.order.pop_front();
        }
    }

    /// Whether it was there a moment ago.
    pub(super) fn knows(&self, name: &str) -> bool {
        self.knows_at(name, Instant::now())
    }

    fn knows_at(&self, name: &str, now: Instant) -> bool {
        let state = self.0.lock();
        let seen = state.seen.get(name);
        seen.is_some_and(|(at, _)| now.duration_since(*at) < LIFE)
    }

    /// It may be there no longer.
    pub(super) fn drop(&self, name: &str) {
        self.0.lock().seen.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_ends_by_itself_and_by_a_failed_load() {
        let hints = Hints::default();
        let now = Instant::now();
        hints.note_at("a", now);
        hints.note_at("b", now);
        assert!(hints.knows_at("a", now + LIFE / 2));
        assert!(!hints.knows_at("a", now + LIFE));
        assert!(!hints.knows_at("c", now));
        hints.drop("b");
        assert!(!hints.knows_at("b", now));
        // Renewed: the end of the first is not its own.
        hints.note_at("a", now + LIFE / 2);
        hints.note_at("d", now + LIFE);
        assert!(hints.knows_at("a", now + LIFE));
    }

    #[test]
    fn hints_are_bounded_whatever_is_done_with_them() {
        let hints = Hints::default();
        let now = Instant::now();
        for number in 0..3 * MOST {
            hints.note_at(&number.to_string(), now);
            hints.note_at("same", now);
            hints.drop(&number.to_string());
        }
        let state = hints.0.lock();
        assert!(state.order.len() <= MOST);
        assert!(state.seen.len() <= MOST);
        drop(state);
        assert!(hints.knows_at("same", now));
    }
}
