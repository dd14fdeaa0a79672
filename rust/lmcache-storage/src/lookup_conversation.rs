//! What one connection of the lookup server asks and is told, without I/O.
//!
//! The scheduler's half asks what is stored; a reader asks where it lies. Neither is served what is the other's.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use lmcache_memory::object::MemoryObj;

use crate::lookup_server::{Counters, LookupAnswer, LookupIndex, count};
use crate::wire::{self, Answer, Request, Status};

/// Chunks that may be held for one reader, all its lookups together.
const MAX_HELD: usize = 1 << 20;

/// Who a peer has shown itself to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The scheduler's half.
    Client,
    /// Another rank, which reads the pool.
    Reader,
}

/// What belongs to one connection.
pub(crate) struct Conversation<'a> {
    index: &'a Arc<dyn LookupIndex>,
    counters: &'a Counters,
    role: Role,
    last_message_id: u64,
    /// What is held for a reader, by lookup; given back when the connection ends.
    held: HashMap<Box<str>, Vec<MemoryObj>>,
}

impl<'a> Conversation<'a> {
    pub(crate) fn new(index: &'a Arc<dyn LookupIndex>, counters: &'a Counters, role: Role) -> Self {
        Self {
            index,
            counters,
            role,
            last_message_id: 0,
            held: HashMap::new(),
        }
    }

    /// Serves one message.
    pub(crate) fn answer(&mut self, message: &[u8]) -> Reply {
        let request = match wire::decode_request(message) {
            Ok(request) => request,
            Err(refusal) => return self.refuse(refusal.message_id, refusal.status),
        };
        let message_id = request.message_id();
        if message_id <= self.last_message_id {
            return self.refuse(message_id, Status::Replayed);
        }
        self.last_message_id = message_id;
        if !self.is_for(&request) {
            return self.refuse(message_id, Status::UnknownKind);
        }
        // A panic must not end the thread that all requests depend on.
        match catch_unwind(AssertUnwindSafe(|| self.ask(&request))) {
            Ok(reply) => reply,
            Err(_) => self.refuse(message_id, Status::Failed),
        }
    }

    fn ask(&mut self, request: &Request<'_>) -> Reply {
        let found = match request {
            Request::Lookup {
                lookup_id,
                namespace,
                hashes,
                ..
            } => {
                let found = self.index.lookup(lookup_id, namespace, hashes);
                count(&self.counters.lookups);
                found
            }
            Request::Release { lookup_id, .. } => {
                self.index.release(lookup_id);
                count(&self.counters.releases);
                return Reply::Nothing;
            }
            Request::Ping { .. } => {
                count(&self.counters.pings);
                LookupAnswer::NOTHING
            }
            Request::Clear { .. } => {
                self.index.clear();
                count(&self.counters.clears);
                LookupAnswer::NOTHING
            }
            Request::Locate {
                message_id,
                lookup_id,
                namespace,
                hashes,
            } => {
                let held = &mut self.held;
                let num_held: usize = held.values().map(Vec::len).sum();
                let room = match held.contains_key(*lookup_id) {
                    // Whoever reads them still must not lose them.
                    true => 0,
                    false => MAX_HELD - num_held,
                };
                let hashes = &hashes[..hashes.len().min(room)];
                let found = match hashes {
                    [] => Vec::new(),
                    _ => self.index.locate(lookup_id, namespace, hashes),
                };
                count(&self.counters.locates);
                let places = wire::encode_places(*message_id, found.iter().map(MemoryObj::place));
                if !found.is_empty() {
                    held.insert((*lookup_id).into(), found);
                }
                return Reply::Bytes(places);
            }
            Request::Done { lookup_id, .. } => {
                let held = self.held.remove(*lookup_id);
                LookupAnswer {
                    hit_chunks: held.map_or(0, |held| held.len() as u32),
                    lease_ms: 0,
                }
            }
            Request::Map { message_id } => {
                let Some(descriptor) = self.index.descriptor() else {
                    return self.refuse(*message_id, Status::Failed);
                };
                count(&self.counters.maps);
                let answer = answered(*message_id, LookupAnswer::NOTHING);
                return Reply::Descriptor(wire::encode_answer(&answer), descriptor);
            }
        };
        answered(request.message_id(), found).into()
    }

    /// Turns a message away.
    pub(crate) fn refuse(&self, message_id: u64, status: Status) -> Reply {
        let counter = match status {
            Status::ForeignVersion => &self.counters.foreign_version,
            Status::UnknownKind => &self.counters.unknown_kind,
            Status::Replayed => &self.counters.replayed,
            Status::Failed => &self.counters.index_failures,
            Status::Malformed | Status::Ok => &self.counters.malformed,
        };
        count(counter);
        let answer = Answer {
            message_id,
            status,
            hit_chunks: 0,
            lease_ms: 0,
        };
        answer.into()
    }

    fn is_for(&self, request: &Request<'_>) -> bool {
        let is_readers = matches!(
            request,
            Request::Locate { .. } | Request::Done { .. } | Request::Map { .. }
        );
        match self.role {
            Role::Client => !is_readers,
            Role::Reader => is_readers || matches!(request, Request::Ping { .. }),
        }
    }
}

/// What goes back to a peer.
pub(crate) enum Reply {
    Nothing,
    Bytes(Vec<u8>),
    /// The descriptor goes along with the bytes.
    Descriptor(Vec<u8>, OwnedFd),
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Self {
        Self::Bytes(wire::encode_answer(&answer))
    }
}

fn answered(message_id: u64, found: LookupAnswer) -> Answer {
    Answer {
        message_id,
        status: Status::Ok,
        hit_chunks: found.hit_chunks,
        lease_ms: found.lease_ms,
    }
}
