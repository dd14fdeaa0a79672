//! Who asks a server that is out of reach: nobody but one probe, now and then.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::client::Refusal;

/// Failures in a row after which a server counts as out of reach. One that took all its time to fail is enough.
const FAILURES: u32 = 3;
/// How long to wait before the first probe, and at most before any other.
const FIRST_PROBE: Duration = Duration::from_millis(250);
const LAST_PROBE: Duration = Duration::from_secs(5);
/// How long a server that takes no puts is left alone, at first and at most.
const FIRST_HOLD: Duration = Duration::from_secs(1);
const LAST_HOLD: Duration = Duration::from_secs(20);

/// Whether a server is asked at all. It opens by failures, and closes by a probe alone.
#[derive(Debug, Default)]
pub(super) struct Breaker(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    failures: u32,
    is_open: bool,
    num_opened: u64,
    last_success: Option<Instant>,
}

impl State {
    fn open(&mut self) -> bool {
        let opens = !self.is_open;
        self.num_opened += u64::from(opens);
        self.is_open = true;
        opens
    }
}

impl Breaker {
    pub(super) fn is_closed(&self) -> bool {
        !self.0.lock().is_open
    }

    /// How often it has opened.
    pub(super) fn num_opened(&self) -> u64 {
        self.0.lock().num_opened
    }

    /// Whether any call has succeeded since then.
    pub(super) fn succeeded_since(&self, then: Instant) -> bool {
        self.0.lock().last_success.is_some_and(|at| at >= then)
    }

    pub(super) fn note_success(&self) {
        let mut state = self.0.lock();
        state.failures = 0;
        state.last_success = Some(Instant::now());
    }

    /// Counts an outage. True if it opened the breaker: whoever is told so sends probes until one comes through.
    pub(super) fn note_outage(&self, refusal: &Refusal) -> bool {
        let mut state = self.0.lock();
        state.failures += match refusal {
            Refusal::Timeout => FAILURES,
            _ => 1,
        };
        state.failures >= FAILURES && state.open()
    }

    /// Opens it whatever came before; true if it was closed.
    pub(super) fn open(&self) -> bool {
        self.0.lock().open()
    }

    /// A probe came through.
    pub(super) fn close(&self) {
        let mut state = self.0.lock();
        state.is_open = false;
        state.failures = 0;
    }
}

/// Waits between probes: each twice the one before.
pub(super) fn probe_waits() -> impl Iterator<Item = Duration> + Send {
    doubling(FIRST_PROBE, LAST_PROBE)
}

fn doubling(first: Duration, last: Duration) -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(first), move |wait| Some((*wait * 2).min(last)))
}

/// Whether a server that is reached is offered puts: one that is full, or lets us only read, is left alone for a
/// while.
#[derive(Debug, Default)]
pub(super) struct Hold(Mutex<Option<Held>>);

#[derive(Debug)]
struct Held {
    until: Instant,
    wait: Duration,
}

impl Hold {
    pub(super) fn lets_through(&self) -> bool {
        let held = self.0.lock();
        held.as_ref()
            .is_none_or(|held| held.until <= Instant::now())
    }

    pub(super) fn note_refused(&self) {
        let mut held = self.0.lock();
        let now = Instant::now();
        let wait = match &*held {
            None => FIRST_HOLD,
            // Puts that were under way together are refused once.
            Some(held) if held.until > now => return,
            Some(held) => (held.wait * 2).min(LAST_HOLD),
        };
        *held = Some(Held {
            until: now + wait,
            wait,
        });
    }

    pub(super) fn note_taken(&self) {
        *self.0.lock() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unreachable() -> Refusal {
        Refusal::Unreachable("refused".into())
    }

    #[test]
    fn failures_in_a_row_open_it_and_a_probe_closes_it() {
        let breaker = Breaker::default();
        assert!(!breaker.note_outage(&unreachable()));
        assert!(!breaker.note_outage(&unreachable()));
        breaker.note_success();
        assert!(!breaker.note_outage(&unreachable()));
        assert!(!breaker.note_outage(&unreachable()));
        assert!(breaker.is_closed());
        assert!(breaker.note_outage(&unreachable()));
        assert!(!breaker.is_closed());
        assert!(!breaker.note_outage(&unreachable()), "one probe is enough");
        breaker.note_success();
        assert!(!breaker.is_closed(), "what was under way closes nothing");
        breaker.close();
        assert!(breaker.is_closed());
        assert_eq!(breaker.num_opened(), 1);
        assert!(!breaker.note_outage(&unreachable()));
    }

    #[test]
    fn one_call_that_waited_in_vain_is_enough() {
        let breaker = Breaker::default();
        assert!(breaker.note_outage(&Refusal::Timeout));
    }

    #[test]
    fn probes_come_ever_more_rarely_and_often_enough() {
        let waits: Vec<Duration> = probe_waits().take(8).collect();
        assert_eq!(waits[0], FIRST_PROBE);
        assert!(waits.windows(2).all(|two| two[0] <= two[1]));
        assert_eq!(waits[7], LAST_PROBE);
    }

    #[test]
    fn a_server_that_takes_no_puts_is_left_alone_for_longer_each_time() {
        let hold = Hold::default();
        assert!(hold.lets_through());
        hold.note_refused();
        assert!(!hold.lets_through());
        hold.note_refused();
        assert_eq!(
            hold.0.lock().as_ref().map(|held| held.wait),
            Some(FIRST_HOLD)
        );
        hold.0.lock().as_mut().expect("held").until = Instant::now();
        assert!(hold.lets_through());
        hold.note_refused();
        assert_eq!(
            hold.0.lock().as_ref().map(|held| held.wait),
            Some(FIRST_HOLD * 2)
        );
        hold.note_taken();
        assert!(hold.lets_through());
    }
}
