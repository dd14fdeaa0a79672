//! Whole transfers behind an engine's back: a request's store or load, handed over in one piece.
//!
//! What must keep its order against a `clear` or a reset is done by whoever hands over: a store has its memory
//! and a load its leases when [`Queue::begin`] is called. The rest, copy and commit, is a thread's, one after
//! the other. Loads have a thread and stores have one: a request waits for its load, and nobody for a store, so
//! the second one leaves the processor to whoever wants it. Both have queues of their own beside
//! [`crate::pipeline::Copier`]'s, which goes at the pace of the engine that asks for layers.
//!
//! Nothing depends on the threads: who waits for a transfer that nobody has begun does it himself, and without a
//! thread the caller does it at once. So is a load on the engine's only core: its request waits for just that
//! work, which is not done sooner beside an engine that asks again and again whether it is done. A store goes to
//! its thread there, too: the step's answer leaves before the copy.
//!
//! The blocks of a transfer are its own until [`Transfer::is_done`]. It goes to its end whether or not anybody
//! keeps the handle; a panic in it is its outcome.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::flow::{Loaded, Stored};
use crate::host::stand_back;
use crate::layerwise::{LoadJob, StoreJob};
use crate::pipeline::{Bucket, lock, sleep};

/// What a transfer did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// A store.
    Stored(Stored),
    /// A load.
    Loaded(Loaded),
}

/// Something to be done once, by whichever thread.
pub trait Work: Send {
    /// Bytes it moves.
    fn bytes(&self) -> usize;
    /// Whether somebody waits for it.
    fn is_awaited(&self) -> bool;
    /// Does it; `pay` is called before each part with its bytes.
    fn carry_out(self: Box<Self>, pay: Option<&dyn Fn(usize)>) -> Outcome;
    /// Does nothing of it, and gives everything back.
    fn call_off(self: Box<Self>) -> Outcome;
}

impl Work for StoreJob {
    fn bytes(&self) -> usize {
        self.planned().bytes
    }

    fn is_awaited(&self) -> bool {
        false
    }

    fn carry_out(mut self: Box<Self>, pay: Option<&dyn Fn(usize)>) -> Outcome {
        match pay {
            None => self.all_layers(),
            Some(pay) => {
                let layer_bytes = self.planned().bytes / self.num_layers().max(1);
                for layer in 0..self.num_layers() {
                    pay(layer_bytes);
                    self.layer(layer);
                }
            }
        }
        Outcome::Stored(self.commit())
    }

    fn call_off(self: Box<Self>) -> Outcome {
        Outcome::Stored(self.commit())
    }
}

impl Work for LoadJob {
    fn bytes(&self) -> usize {
        self.planned().bytes
    }

    fn is_awaited(&self) -> bool {
        true
    }

    fn carry_out(self: Box<Self>, pay: Option<&dyn Fn(usize)>) -> Outcome {
        match pay {
            None => self.all_layers(),
            Some(pay) => {
                for layer in 0..self.num_layers() {
                    pay(self.layer_bytes());
                    self.layer(layer);
                }
            }
        }
        Outcome::Loaded(self.finish())
    }

    fn call_off(self: Box<Self>) -> Outcome {
        Outcome::Loaded(self.finish())
    }
}

/// Transfers in the order they are done in, and the threads that do them: each starts with its first transfer,
/// and ends with the value, or its close.
#[derive(Debug)]
pub struct Queue {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    line: Mutex<Line>,
    awaited_arrived: Condvar,
    others_arrived: Condvar,
    bucket: Option<Bucket>,
}

#[derive(Debug, Default)]
struct Line {
    /// What somebody waits for.
    awaited: Side,
    others: Side,
    /// Whether a thread has a core to itself; asked once.
    has_room: Option<bool>,
    is_closed: bool,
}

#[derive(Debug, Default)]
struct Side {
    /// Those that have not ended.
    tickets: VecDeque<Arc<Ticket>>,
    thread: Option<JoinHandle<()>>,
}

impl Line {
    fn side(&mut self, is_awaited: bool) -> &mut Side {
        match is_awaited {
            true => &mut self.awaited,
            false => &mut self.others,
        }
    }
}

impl Queue {
    /// Starts nothing yet. `bytes_per_second` slows transfers down, whoever does them: for measurements and
    /// tests, which get their thread on any machine.
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        Self {
            shared: Arc::new(Shared {
                bucket: bytes_per_second.map(Bucket::new),
                ..Shared::default()
            }),
        }
    }

    /// Hands a transfer over. What moves nothing is done when this returns, and after a close nothing is done.
    pub fn begin(&self, work: impl Work + 'static) -> Transfer {
        let (is_awaited, bytes) = (work.is_awaited(), work.bytes());
        let ticket = Arc::new(Ticket {
            stage: Mutex::new(Stage::Waiting(Box::new(work))),
            ended: Condvar::new(),
        });
        let transfer = Transfer {
            ticket: Arc::clone(&ticket),
            shared: Arc::clone(&self.shared),
        };
        let mut line = lock(&self.shared.line);
        if line.is_closed {
            drop(line);
            ticket.call_off();
            return transfer;
        }
        let goes_along = bytes > 0 && self.shared.has_thread(&mut line, is_awaited);
        // In the line in any case: a close waits for it.
        let side = line.side(is_awaited);
        side.tickets.push_back(Arc::clone(&ticket));
        drop(line);
        if goes_along {
            self.shared.arrived(is_awaited).notify_one();
        } else {
            self.shared.carry_out(&ticket);
        }
        transfer
    }

    /// Calls off what nobody has begun, waits for what is under way, and ends the threads. Idempotent.
    pub fn close(&self) {
        let mut line = lock(&self.shared.line);
        line.is_closed = true;
        let mut left = Vec::new();
        let threads = [true, false].map(|is_awaited| {
            let side = line.side(is_awaited);
            left.extend(side.tickets.drain(..));
            self.shared.arrived(is_awaited).notify_all();
            side.thread.take()
        });
        drop(line);
        left.retain(|ticket| !ticket.call_off());
        for ticket in left {
            ticket.wait(None);
        }
        for thread in threads.into_iter().flatten() {
            // It catches what panics; there is nothing to hear from it.
            let _ = thread.join();
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// Whether the thread takes such a transfer; it is started for the first one.
    fn has_thread(self: &Arc<Self>, line: &mut Line, is_awaited: bool) -> bool {
        let has_room = *line.has_room.get_or_insert_with(|| {
            self.bucket.is_some()
                || thread::available_parallelism().is_ok_and(|cores| cores.get() > 1)
        });
        if is_awaited && !has_room {
            return false;
        }
        let side = line.side(is_awaited);
        if side.thread.is_none() {
            let shared = Arc::clone(self);
            let name = if is_awaited {
                "lmcache-loads"
            } else {
                "lmcache-stores"
            };
            let named = thread::Builder::new().name(name.into());
            side.thread = named.spawn(move || shared.serve(is_awaited)).ok();
        }
        side.thread.is_some()
    }

    fn arrived(&self, is_awaited: bool) -> &Condvar {
        match is_awaited {
            true => &self.awaited_arrived,
            false => &self.others_arrived,
        }
    }

    fn serve(&self, is_awaited: bool) {
        stand_back(!is_awaited);
        while let Some(ticket) = self.next(is_awaited) {
            self.carry_out(&ticket);
        }
    }

    fn next(&self, is_awaited: bool) -> Option<Arc<Ticket>> {
        let mut line = lock(&self.line);
        loop {
            if line.is_closed {
                return None;
            }
            let mut tickets = line.side(is_awaited).tickets.iter();
            if let Some(ticket) = tickets.find(|ticket| ticket.is_waiting()) {
                return Some(Arc::clone(ticket));
            }
            line = sleep(self.arrived(is_awaited), line);
        }
    }

    /// Does a transfer, unless somebody has begun it.
    fn carry_out(&self, ticket: &Arc<Ticket>) {
        let Some(work) = ticket.take() else {
            return;
        };
        let pay = self.bucket.as_ref().map(|bucket| |bytes| bucket.pay(bytes));
        let pay = pay.as_ref().map(|pay| pay as &dyn Fn(usize));
        // Unwind safety: what was not committed was never visible, and goes back as the work is dropped.
        let outcome = catch_unwind(AssertUnwindSafe(|| work.carry_out(pay)));
        ticket.end(outcome.map_err(|panic| panic_text(&*panic)));
        let mut line = lock(&self.line);
        let is_other = |other: &Arc<Ticket>| !Arc::ptr_eq(other, ticket);
        line.awaited.tickets.retain(is_other);
        line.others.tickets.retain(is_other);
    }
}

/// What a panic said.
pub fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no text").into()
}

/// A transfer under way, or done. Dropping it changes nothing.
#[derive(Debug)]
pub struct Transfer {
    ticket: Arc<Ticket>,
    shared: Arc<Shared>,
}

impl Transfer {
    /// Whether it has ended: its blocks are the engine's again.
    pub fn is_done(&self) -> bool {
        matches!(*lock(&self.ticket.stage), Stage::Ended(_))
    }

    /// Returns once it has ended, or after `timeout`; whether it has. Without a timeout it is done here if
    /// nobody has begun it.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        if timeout.is_none() {
            self.shared.carry_out(&self.ticket);
        }
        self.ticket.wait(timeout)
    }

    /// What it did, or the text of its panic; `None` while it has not ended.
    pub fn outcome(&self) -> Option<Result<Outcome, String>> {
        match &*lock(&self.ticket.stage) {
            Stage::Ended(outcome) => Some(outcome.clone()),
            Stage::Waiting(_) | Stage::Running => None,
        }
    }
}

#[derive(Debug)]
struct Ticket {
    stage: Mutex<Stage>,
    ended: Condvar,
}

enum Stage {
    Waiting(Box<dyn Work>),
    Running,
    Ended(Result<Outcome, String>),
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Waiting(_) => f.write_str("Waiting"),
            Self::Running => f.write_str("Running"),
            Self::Ended(outcome) => f.debug_tuple("Ended").field(outcome).finish(),
        }
    }
}

impl Ticket {
    fn is_waiting(&self) -> bool {
        matches!(*lock(&self.stage), Stage::Waiting(_))
    }

    /// The work, which is the caller's from now on.
    fn take(&self) -> Option<Box<dyn Work>> {
        let mut stage = lock(&self.stage);
        match std::mem::replace(&mut *stage, Stage::Running) {
            Stage::Waiting(work) => Some(work),
            other => {
                *stage = other;
                None
            }
        }
    }

    fn end(&self, outcome: Result<Outcome, String>) {
        *lock(&self.stage) = Stage::Ended(outcome);
        self.ended.notify_all();
    }

    /// Ends what nobody has begun; whether that was so.
    fn call_off(&self) -> bool {
        let work = self.take();
        let is_ours = work.is_some();
        if let Some(work) = work {
            let outcome = catch_unwind(AssertUnwindSafe(|| work.call_off()));
            self.end(outcome.map_err(|panic| panic_text(&*panic)));
        }
        is_ours
    }

    fn wait(&self, timeout: Option<Duration>) -> bool {
        // A time too far away to be named never comes.
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut stage = lock(&self.stage);
        while !matches!(*stage, Stage::Ended(_)) {
            let Some(until) = until else {
                stage = sleep(&self.ended, stage);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let woken = self.ended.wait_timeout(stage, left);
            stage = woken.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        true
    }
}

#[cfg(test)]
mod tests;
