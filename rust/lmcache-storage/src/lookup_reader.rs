//! Reads another rank's pool: where its bytes are copied from, the rank's server holds them.
//!
//! The server gives the pool's descriptor once, when the connection is made; a chunk is asked for by its hash,
//! read out of the mapping, and given back. What the server holds ends with the connection, on whichever side
//! that happens. So nothing that was read counts before the server has said that it held the chunks to the end.
//!
//! Calls wait for the server, for as long as the deadline says: they belong on a thread that nobody waits for.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lmcache_core::hash::ChunkHash;
use lmcache_memory::error::MemoryError;
use lmcache_memory::mapped::Keeper;
use lmcache_memory::region::{ForeignChunk, ForeignRegion};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};
use thiserror::Error;

use crate::lookup_client::{Peer, connect_at_once};
use crate::wire::{self, Answer, Status, WireError};
use crate::zmtp::{self, Frame, GREETING_BYTES, ZmtpError};

/// Room for one read. The places of 512 chunks are 8 KiB.
const READ_BYTES: usize = 16 << 10;

/// Descriptors that one read may bring; all but one are closed again.
const MAX_DESCRIPTORS: usize = 4;

/// Why another rank's pool cannot be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReaderError {
    /// The system refused.
    #[error("cannot {what} the lookup server at {}: {source}", path.display())]
    System {
        /// What was tried.
        what: &'static str,
        /// Its socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It said nothing in time.
    #[error(
        "the lookup server at {} did not answer within {deadline:?}; does its process run?", path.display()
    )]
    Timeout {
        /// Its socket.
        path: PathBuf,
        /// How long was waited.
        deadline: Duration,
    },
    /// What it said is not of this protocol.
    #[error("the lookup server at {} broke the protocol: {what}", path.display())]
    Protocol {
        /// Its socket.
        path: PathBuf,
        /// What was wrong.
        what: String,
    },
    /// Its memory cannot be mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// A reader of one rank's pool. Made anew, the connection serves as before; what was held is lost.
#[derive(Debug)]
pub struct RegionReader {
    peer: Peer,
    deadline: Duration,
    link: Mutex<Option<Link>>,
}

impl RegionReader {
    /// Connects to the server, which must know readers by this secret, and maps its pool. `deadline` is for
    /// each question.
    pub fn connect(peer: Peer, deadline: Duration) -> Result<Self, ReaderError> {
        let link = Link::open(&peer, deadline)?;
        Ok(Self {
            peer,
            deadline,
            link: Mutex::new(Some(link)),
        })
    }

    /// Bytes of the pool, as it was mapped last; 0 while there is no connection.
    pub fn capacity_bytes(&self) -> u64 {
        let link = self.lock();
        link.as_ref().map_or(0, |link| link.region.len() as u64)
    }

    /// Ends the connection, and with it whatever is held.
    pub fn close(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<Link>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks, over a new connection if there is none and `reconnects`. One that has failed is given up.
    fn ask<T>(
        &self,
        reconnects: bool,
        ask: impl FnOnce(&mut Link, &Talk<'_>) -> Result<T, ReaderError>,
    ) -> Option<T> {
        let mut link = self.lock();
        if link.is_none() && reconnects {
            match Link::open(&self.peer, self.deadline) {
                Ok(new) => *link = Some(new),
                Err(error) => tracing::warn!(%error, "another rank's pool cannot be read"),
            }
        }
        let open = link.as_mut()?;
        let talk = Talk::begin(&self.peer, self.deadline);
        match ask(open, &talk) {
            Ok(answer) => Some(answer),
            Err(error) => {
                tracing::warn!(%error, "another rank's pool cannot be read");
                *link = None;
                None
            }
        }
    }
}

impl Keeper for RegionReader {
    fn hold(&self, lookup_id: &str, namespace: &str, hashes: &[ChunkHash]) -> Vec<ForeignChunk> {
        let packed: Vec<u8> = hashes.iter().flat_map(|hash| hash.0).collect();
        let held = self.ask(true, |link, talk| {
            let message_id = link.next_id();
            let message = wire::encode_locate(message_id, lookup_id, namespace, &packed);
            let body = link.exchange(&message, talk)?;
            let (answers, places) = match wire::decode_places(&body) {
                Ok(places) => places,
                // A refusal holds nothing.
                Err(_) => (talk.answer(&body)?.message_id, Vec::new()),
            };
            if answers != message_id || places.len() > hashes.len() {
                return Err(talk.broken("places that were not asked for"));
            }
            let chunk = |&place| link.region.chunk(place);
            let chunks: Option<Vec<_>> = places.iter().map(chunk).collect();
            chunks.ok_or_else(|| talk.broken("a place beyond its memory"))
        });
        held.unwrap_or_default()
    }

    fn let_go(&self, lookup_id: &str, num_chunks: usize) -> bool {
        // A new connection has held nothing.
        let held = self.ask(false, |link, talk| {
            let message_id = link.next_id();
            let body = link.exchange(&wire::encode_done(message_id, lookup_id), talk)?;
            let answer = talk.answer(&body)?;
            match answer.message_id == message_id {
                true => Ok(answer),
                false => Err(talk.broken("an answer to another question")),
            }
        });
        held.is_some_and(|answer| {
            answer.status == Status::Ok && answer.hit_chunks as usize == num_chunks
        })
    }
}

/// One question's time, and whom it is put to.
struct Talk<'a> {
    peer: &'a Peer,
    deadline: Duration,
    give_up_at: Instant,
}

impl<'a> Talk<'a> {
    fn begin(peer: &'a Peer, deadline: Duration) -> Self {
        Self {
            peer,
            deadline,
            give_up_at: Instant::now() + deadline,
        }
    }

    fn left(&self) -> Result<Duration, ReaderError> {
        let left = self.give_up_at.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(self.late()),
            false => Ok(left),
        }
    }

    fn late(&self) -> ReaderError {
        ReaderError::Timeout {
            path: self.peer.path.clone(),
            deadline: self.deadline,
        }
    }

    fn failed(&self, what: &'static str, source: io::Error) -> ReaderError {
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => self.late(),
            _ => ReaderError::System {
                what,
                path: self.peer.path.clone(),
                source,
            },
        }
    }

    fn broken(&self, what: impl Into<String>) -> ReaderError {
        ReaderError::Protocol {
            path: self.peer.path.clone(),
            what: what.into(),
        }
    }

    fn answer(&self, body: &[u8]) -> Result<Answer, ReaderError> {
        wire::decode_answer(body).map_err(|error: WireError| self.broken(error.to_string()))
    }

    fn frames(&self, error: ZmtpError) -> ReaderError {
        self.broken(error.to_string())
    }
}

#[derive(Debug)]
struct Link {
    stream: UnixStream,
    inbox: Vec<u8>,
    last_message_id: u64,
    region: Arc<ForeignRegion>,
}

impl Link {
    fn open(peer: &Peer, deadline: Duration) -> Result<Self, ReaderError> {
        let talk = Talk::begin(peer, deadline);
        let connect = || {
            let stream = connect_at_once(&peer.path)?;
            stream.set_nonblocking(false)?;
            Ok(stream)
        };
        let stream = connect().map_err(|error| talk.failed("connect to", error))?;
        let (mut inbox, mut came) = (Vec::new(), Vec::new());
        let mut introduction = zmtp::greeting().to_vec();
        introduction.extend(zmtp::ready("DEALER", &peer.secret));
        write(&stream, &introduction, &talk)?;
        while inbox.len() < GREETING_BYTES {
            read(&stream, &mut inbox, &mut came, &talk)?;
        }
        let greeting = inbox.first_chunk::<GREETING_BYTES>();
        zmtp::check_greeting(greeting.expect("as many bytes are there"))
            .map_err(|error| talk.frames(error))?;
        inbox.drain(..GREETING_BYTES);
        loop {
            match zmtp::next_frame(&inbox, 0).map_err(|error| talk.frames(error))? {
                Some((Frame::Command(command), used)) => {
                    zmtp::check_ready(command, "ROUTER").map_err(|error| talk.frames(error))?;
                    inbox.drain(..used);
                    break;
                }
                Some((Frame::Message { .. }, _)) => return Err(talk.frames(ZmtpError::Ready)),
                None => read(&stream, &mut inbox, &mut came, &talk)?,
            }
        }
        let message_id = 1;
        let body = exchange(
            &stream,
            &mut inbox,
            &mut came,
            &wire::encode_map(message_id),
            &talk,
        )?;
        let answer = talk.answer(&body)?;
        let descriptor = came.pop();
        let descriptor = descriptor
            .filter(|_| answer.message_id == message_id && answer.status == Status::Ok)
            .ok_or_else(|| talk.broken("it gives no pool away"))?;
        let region = Arc::new(ForeignRegion::map(descriptor.as_fd())?);
        Ok(Self {
            stream,
            inbox,
            last_message_id: message_id,
            region,
        })
    }

    fn next_id(&mut self) -> u64 {
        self.last_message_id += 1;
        self.last_message_id
    }

    fn exchange(&mut self, message: &[u8], talk: &Talk<'_>) -> Result<Vec<u8>, ReaderError> {
        let mut came = Vec::new();
        exchange(&self.stream, &mut self.inbox, &mut came, message, talk)
    }
}

/// One question and its answer, and the descriptors that came along.
fn exchange(
    stream: &UnixStream,
    inbox: &mut Vec<u8>,
    came: &mut Vec<OwnedFd>,
    message: &[u8],
    talk: &Talk<'_>,
) -> Result<Vec<u8>, ReaderError> {
    if message.len() > wire::MAX_MESSAGE_BYTES {
        return Err(talk.broken("a question longer than it reads"));
    }
    let mut framed = Vec::with_capacity(message.len() + 9);
    zmtp::put_message(&mut framed, message);
    write(stream, &framed, talk)?;
    loop {
        let frame = zmtp::next_frame(inbox, wire::MAX_MESSAGE_BYTES);
        match frame.map_err(|error| talk.frames(error))? {
            Some((Frame::Message { body, more: false }, used)) => {
                let body = body.to_vec();
                inbox.drain(..used);
                return Ok(body);
            }
            Some((Frame::Message { more: true, .. }, _)) => {
                return Err(talk.broken("an answer in several frames"));
            }
            Some((Frame::Command(_), used)) => {
                inbox.drain(..used);
            }
            None => read(stream, inbox, came, talk)?,
        }
    }
}

fn write(stream: &UnixStream, mut bytes: &[u8], talk: &Talk<'_>) -> Result<(), ReaderError> {
    while !bytes.is_empty() {
        let left = talk.left()?;
        let timed = stream.set_write_timeout(Some(left));
        timed.map_err(|error| talk.failed("set up the connection to", error))?;
        // A signal for a broken pipe would be the engine's.
        match send(stream, bytes, SendFlags::NOSIGNAL) {
            Ok(num_sent) => bytes = &bytes[num_sent..],
            Err(Errno::INTR) => {}
            Err(error) => return Err(talk.failed("write to", error.into())),
        }
    }
    Ok(())
}

fn read(
    stream: &UnixStream,
    inbox: &mut Vec<u8>,
    came: &mut Vec<OwnedFd>,
    talk: &Talk<'_>,
) -> Result<(), ReaderError> {
    let left = talk.left()?;
    let timed = stream.set_read_timeout(Some(left));
    timed.map_err(|error| talk.failed("set up the connection to", error))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut piece = [0; READ_BYTES];
    let mut pieces = [io::IoSliceMut::new(&mut piece)];
    let received = recvmsg(stream, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            came.extend(descriptors);
        }
    }
    match received {
        Ok(received) if received.bytes == 0 => {
            let error = io::Error::from(io::ErrorKind::UnexpectedEof);
            Err(talk.failed("read from", error))
        }
        Ok(received) => {
            inbox.extend(&piece[..received.bytes]);
            Ok(())
        }
        Err(Errno::INTR) => Ok(()),
        Err(error) => Err(talk.failed("read from", error.into())),
    }
}
