//! The asking end of the lookup protocol: a connection to each rank's server.
//!
//! No thread and no event loop of its own: everything happens in the caller's calls, so that a question and
//! its answer take one wake-up each way. Nothing blocks but [`Connections::receive`], for as long as it is
//! told to. Connecting to a Unix socket is done at once or refused at once. Greeting and READY go out together;
//! questions wait for the server's READY, as a libzmq peer loses what comes sooner.

use std::io::{self, Read};
use std::mem;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, send, socket_with,
};

use crate::wire::{self, Answer};
use crate::zmtp::{self, Frame, GREETING_BYTES, ZmtpError};

/// What may wait for one server that does not read, in bytes; one message always may.
const MAX_OUTBOX_BYTES: usize = 2 * wire::MAX_MESSAGE_BYTES;

/// What may wait beyond that, so that whatever was asked can be given back.
const POSTED_BYTES: usize = wire::MAX_MESSAGE_BYTES;

/// The longest answer that is read, in bytes; those of this protocol have some twenty.
const MAX_ANSWER_BYTES: usize = 1024;

/// Taken from one connection in one call, so that a server which never stops cannot hold the caller.
const READ_BYTES: usize = 64 << 10;

/// One server to ask.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Its socket.
    pub path: PathBuf,
    /// What it asks of its clients; empty if nothing. At most 255 bytes.
    pub secret: Vec<u8>,
}

/// What has come from a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// An answer.
    Answer(Answer),
    /// A message that is no answer of this protocol.
    Malformed,
    /// The connection has ended: what it owed will not come.
    Lost,
}

/// The connections to all ranks' servers.
#[derive(Debug)]
pub struct Connections {
    peers: Vec<Peer>,
    links: Vec<Option<Link>>,
    /// Ranks whose connection broke under a send, to be told with the next [`Connections::receive`].
    lost: Vec<usize>,
}

impl Connections {
    /// Connects to nobody yet.
    pub fn new(peers: Vec<Peer>) -> Self {
        let links = peers.iter().map(|_| None).collect();
        let lost = Vec::new();
        Self { peers, links, lost }
    }

    /// How many ranks there are.
    pub fn num_ranks(&self) -> usize {
        self.peers.len()
    }

    /// Makes the connections that are missing; whether every rank has one then.
    ///
    /// A server that hangs has one for as long as the system takes connections in for it.
    pub fn connect(&mut self) -> bool {
        let mut all = true;
        for (link, peer) in self.links.iter_mut().zip(&self.peers) {
            if link.is_none() {
                *link = Link::open(peer).ok();
            }
            all &= link.is_some();
        }
        all
    }

    /// Sends one message to each of these ranks, or to none: false if one of them is not connected, or has
    /// left too much unread.
    pub fn send(&mut self, message: &[u8], ranks: &[usize]) -> bool {
        let takes = |&rank: &usize| self.takes(rank, message.len(), MAX_OUTBOX_BYTES);
        let all = ranks.iter().all(takes);
        if all {
            ranks.iter().for_each(|&rank| self.put(rank, message));
        }
        all
    }

    /// Sends one message to every rank that can be told; those that cannot.
    pub fn post(&mut self, message: &[u8]) -> Vec<usize> {
        let limit = MAX_OUTBOX_BYTES + POSTED_BYTES;
        let (takes, not): (Vec<_>, Vec<_>) =
            (0..self.links.len()).partition(|&rank| self.takes(rank, message.len(), limit));
        takes.into_iter().for_each(|rank| self.put(rank, message));
        not
    }

    fn takes(&self, rank: usize, num_bytes: usize, limit: usize) -> bool {
        let link = self.links.get(rank).and_then(Option::as_ref);
        link.is_some_and(|link| link.has_room(num_bytes, limit))
    }

    fn put(&mut self, rank: usize, message: &[u8]) {
        let link = &mut self.links[rank];
        let Some(open) = link else { return };
        zmtp::put_message(&mut open.outbox, message);
        if open.flush().is_err() {
            *link = None;
            self.lost.push(rank);
        }
    }

    /// What has come, with the rank it came from; waits for at most `wait` if that is nothing.
    pub fn receive(&mut self, wait: Duration) -> Vec<(usize, Event)> {
        let mut events = Vec::new();
        self.exchange(&mut events);
        if events.is_empty() && !wait.is_zero() && self.wait(wait) {
            self.exchange(&mut events);
        }
        events
    }

    /// Ends all connections. What is not sent by now never is.
    pub fn close(&mut self) {
        self.links.fill_with(|| None);
        self.lost.clear();
    }

    /// Writes and reads as much as can be at once.
    fn exchange(&mut self, events: &mut Vec<(usize, Event)>) {
        events.extend(self.lost.drain(..).map(|rank| (rank, Event::Lost)));
        for (rank, link) in self.links.iter_mut().enumerate() {
            let Some(open) = link else { continue };
            let tell = |event| events.push((rank, event));
            if open.flush().is_err() || open.read(tell).is_err() {
                *link = None;
                events.push((rank, Event::Lost));
            }
        }
    }

    /// Whether anything can be read or written before `wait` is over.
    fn wait(&self, wait: Duration) -> bool {
        let open = self.links.iter().flatten();
        let mut watched: Vec<PollFd<'_>> = open
            .map(|link| {
                let mut wanted = PollFlags::IN;
                wanted.set(PollFlags::OUT, !link.sendable().is_empty());
                PollFd::new(&link.stream, wanted)
            })
            .collect();
        let Ok(timeout) = Timespec::try_from(wait) else {
            return false;
        };
        // Not in milliseconds, as the event loops count.
        poll(&mut watched, Some(&timeout)).is_ok_and(|num_ready| num_ready > 0)
    }
}

/// How far the introduction has got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Greeting,
    Ready,
    Open,
}

#[derive(Debug)]
struct Link {
    stream: UnixStream,
    phase: Phase,
    inbox: Vec<u8>,
    /// What is to be sent, greeting and READY first, of which `num_sent` bytes are.
    outbox: Vec<u8>,
    num_sent: usize,
    /// Length of greeting and READY.
    introduction_bytes: usize,
    /// Inside a message of several frames, of which this protocol has none.
    in_parts: bool,
}

/// Why a connection is given up.
#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Zmtp(#[from] ZmtpError),
}

impl Link {
    fn open(peer: &Peer) -> io::Result<Self> {
        let stream = connect_at_once(&peer.path)?;
        let mut outbox = zmtp::greeting().to_vec();
        outbox.extend(zmtp::ready("DEALER", &peer.secret));
        Ok(Self {
            stream,
            phase: Phase::Greeting,
            inbox: Vec::new(),
            introduction_bytes: outbox.len(),
            outbox,
            num_sent: 0,
            in_parts: false,
        })
    }

    /// What may be sent by now.
    fn sendable(&self) -> &[u8] {
        let end = match self.phase {
            Phase::Open => self.outbox.len(),
            Phase::Greeting | Phase::Ready => self.introduction_bytes,
        };
        &self.outbox[self.num_sent..end]
    }

    fn has_room(&self, num_bytes: usize, limit: usize) -> bool {
        let waiting = self.outbox.len() - self.num_sent;
        waiting == 0 || waiting + num_bytes <= limit
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.sendable().is_empty() {
            // A signal for a broken pipe would be the engine's.
            match send(&self.stream, self.sendable(), SendFlags::NOSIGNAL) {
                Ok(num_bytes) => self.num_sent += num_bytes,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(error.into()),
            }
        }
        if self.phase != Phase::Open {
            return Ok(());
        }
        if self.num_sent == self.outbox.len() {
            self.outbox.clear();
            self.outbox.shrink_to(READ_BYTES);
            self.num_sent = 0;
        } else if self.num_sent > MAX_OUTBOX_BYTES {
            self.outbox.drain(..mem::take(&mut self.num_sent));
        }
        Ok(())
    }

    fn read(&mut self, mut tell: impl FnMut(Event)) -> Result<(), LinkError> {
        let mut piece = [0; 4096];
        let mut num_read = 0;
        while num_read < READ_BYTES {
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(num_bytes) => {
                    num_read += num_bytes;
                    self.inbox.extend(&piece[..num_bytes]);
                    self.take_frames(&mut tell)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn take_frames(&mut self, tell: &mut impl FnMut(Event)) -> Result<(), LinkError> {
        let mut num_used = 0;
        let mut inbox = mem::take(&mut self.inbox);
        loop {
            let rest = &inbox[num_used..];
            if self.phase == Phase::Greeting {
                let Some((greeting, _)) = rest.split_first_chunk::<GREETING_BYTES>() else {
                    break;
                };
                zmtp::check_greeting(greeting)?;
                num_used += GREETING_BYTES;
                self.phase = Phase::Ready;
                continue;
            }
            let Some((frame, used)) = zmtp::next_frame(rest, MAX_ANSWER_BYTES)? else {
                break;
            };
            match (self.phase, frame) {
                (Phase::Ready, Frame::Command(command)) => {
                    zmtp::check_ready(command, "ROUTER")?;
                    self.phase = Phase::Open;
                    self.flush()?;
                }
                (Phase::Ready, Frame::Message { .. }) => return Err(ZmtpError::Ready.into()),
                (_, Frame::Command(_)) => {}
                (_, Frame::Message { body, more }) => {
                    let is_part = mem::replace(&mut self.in_parts, more) || more;
                    let answer = wire::decode_answer(body).ok().filter(|_| !is_part);
                    if !more {
                        tell(answer.map_or(Event::Malformed, Event::Answer));
                    }
                }
            }
            num_used += used;
        }
        inbox.drain(..num_used);
        self.inbox = inbox;
        Ok(())
    }
}

/// Connects without waiting: a server that takes no more connections in refuses this one.
pub(crate) fn connect_at_once(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(socket.as_fd(), &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}
