//! Answers lookups of the scheduler's process out of the worker's index.
//!
//! A thread of its own with no Python in it, so that an answer never waits for an interpreter. It speaks
//! ZMTP over a Unix socket to DEALER peers; messages are those of [`crate::wire`]. Each connection is
//! served in order and by itself: a peer that does not read its answers is not read from either, and holds
//! up nobody else. Nothing a peer sends ends the server, or makes it hold more for that peer than one
//! message of [`wire::MAX_MESSAGE_BYTES`].
//!
//! A server that is given a secret serves only peers whose ZMTP identity it is, and of those the newest: an
//! engine has one client, and what an older connection of it has left unread must not touch the leases of the
//! newer one. Whoever cannot introduce itself holds no place that the engine could need.
//!
//! Where other processes read the pool itself, each has a connection of its own, under another secret: it is
//! given the pool's descriptor, and where chunks lie, which are held for it until it says that it is done or the
//! connection ends.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use std::{io, mem, process};

use lmcache_core::hash::ChunkHash;
use lmcache_core::key::with_fields;
use lmcache_memory::object::MemoryObj;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Runtime;
use tokio::sync::{oneshot, watch};
use tokio::task::{self, JoinHandle};
use tokio::time;

pub use crate::error::LookupServerError;
use crate::lookup_conversation::{Conversation, Reply, Role};
use crate::socket_file::SocketFile;
use crate::wire::{self, Status};
use crate::zmtp::{self, Frame, GREETING_BYTES, ZmtpError};

/// Connections at a time; beyond them an idle one is closed, or the new one. An engine needs one.
const MAX_CONNECTIONS: usize = 64;

/// Connections that have not introduced themselves; beyond them the oldest is closed. A client of ours is
/// through with it the first time it is heard.
const MAX_GREETING: usize = 64;

/// At the limit, the connection that has been idle for longest makes way if it has been so for this long.
const IDLE_MAKES_WAY: Duration = Duration::from_secs(1);

/// A peer that has not introduced itself by then is dropped.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

/// Room for one read. A lookup of 512 chunks is 16 KiB.
const READ_BYTES: usize = 64 << 10;

/// Answers are sent once this much has gathered, if not before.
const OUTBOX_BYTES: usize = 16 << 10;

/// What a lookup found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookupAnswer {
    /// Chunks of the longest stored prefix.
    pub hit_chunks: u32,
    /// How long the lease behind the answer holds from now, in milliseconds; 0 when nothing is leased.
    pub lease_ms: u32,
}

impl LookupAnswer {
    pub(crate) const NOTHING: Self = Self {
        hit_chunks: 0,
        lease_ms: 0,
    };
}

/// What the server asks. Called by its one thread, which answers nobody in the meantime.
pub trait LookupIndex: Send + Sync + 'static {
    /// Finds the longest stored prefix and leases it under `lookup_id`, in place of what that id held.
    fn lookup(&self, lookup_id: &str, namespace: &str, hashes: &[ChunkHash]) -> LookupAnswer;

    /// Gives back what `lookup_id` leases; an unknown id is not an error.
    fn release(&self, lookup_id: &str);

    /// Forgets every chunk; what is leased lives on unseen until its lease ends.
    fn clear(&self);

    /// Takes one reader's share of what `lookup_id` leases: these chunks, up to the first that is not there.
    fn locate(&self, _lookup_id: &str, _namespace: &str, _hashes: &[ChunkHash]) -> Vec<MemoryObj> {
        Vec::new()
    }

    /// What readers map, if they may.
    fn descriptor(&self) -> Option<OwnedFd> {
        None
    }
}

/// What one rank of an engine answers: the engine asks all of them by a name that says nothing of ranks, and
/// each rank keeps its part of a chunk under its own.
pub struct RankIndex {
    index: Arc<dyn LookupIndex>,
    own_fields: BTreeMap<String, String>,
}

impl RankIndex {
    /// Looks into `index`, where namespaces have `own_fields` (see [`with_fields`]).
    pub fn new(index: Arc<dyn LookupIndex>, own_fields: BTreeMap<String, String>) -> Self {
        Self { index, own_fields }
    }
}

impl LookupIndex for RankIndex {
    fn lookup(&self, lookup_id: &str, namespace: &str, hashes: &[ChunkHash]) -> LookupAnswer {
        let own = with_fields(namespace, &self.own_fields);
        self.index.lookup(lookup_id, &own, hashes)
    }

    fn release(&self, lookup_id: &str) {
        self.index.release(lookup_id);
    }

    fn clear(&self) {
        self.index.clear();
    }

    fn locate(&self, lookup_id: &str, namespace: &str, hashes: &[ChunkHash]) -> Vec<MemoryObj> {
        let own = with_fields(namespace, &self.own_fields);
        self.index.locate(lookup_id, &own, hashes)
    }

    fn descriptor(&self) -> Option<OwnedFd> {
        self.index.descriptor()
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What has happened since the server started.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct LookupServerStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl LookupServerStats {
            /// Name and value of each counter.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }

        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl Counters {
            fn read(&self) -> LookupServerStats {
                LookupServerStats {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                }
            }
        }
    };
}

counters! {
    /// Lookups answered.
    lookups,
    /// Releases served.
    releases,
    /// Pings answered.
    pings,
    /// Clears answered.
    clears,
    /// Requests for places answered.
    locates,
    /// Descriptors given away.
    maps,
    /// Connections of readers served.
    readers,
    /// Messages that are not of this protocol.
    malformed,
    /// Messages of another version.
    foreign_version,
    /// Messages of an unknown kind.
    unknown_kind,
    /// Messages whose id was not above those before it on the connection.
    replayed,
    /// Connections ended because a frame was above the size limit.
    oversized,
    /// Connections ended because the bytes were not ZMTP.
    broken_connections,
    /// Connections refused: a foreign user, a failed handshake, or too many at a time.
    refused_connections,
    /// Connections refused because the peer did not know the server's secret.
    strangers,
    /// Connections ended because the same client has made a newer one.
    superseded_connections,
    /// Connections served.
    connections,
    /// Requests at which the index panicked.
    index_failures,
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// A running server. Dropping it closes it.
#[derive(Debug)]
pub struct LookupServer {
    path: PathBuf,
    counters: Arc<Counters>,
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    pid: u32,
    stop: oneshot::Sender<()>,
    thread: thread::JoinHandle<()>,
    file: SocketFile,
}

impl LookupServer {
    /// Listens at `path` and answers from `index` those whose identity is `secret`, or anybody of this user
    /// if that is empty.
    ///
    /// The folder is made if need be; it must be this user's own and closed to all others. A socket left
    /// behind by a dead process is replaced; one that a live process serves is [`LookupServerError::InUse`].
    pub fn start(
        path: &Path,
        index: Arc<dyn LookupIndex>,
        secret: &[u8],
    ) -> Result<Self, LookupServerError> {
        Self::start_shared(path, index, secret, b"")
    }

    /// As [`LookupServer::start`], for readers of the pool as well: those whose identity is `reader_secret`.
    pub fn start_shared(
        path: &Path,
        index: Arc<dyn LookupIndex>,
        secret: &[u8],
        reader_secret: &[u8],
    ) -> Result<Self, LookupServerError> {
        let (file, listener) = SocketFile::bind(path)?;
        let failed = |what| {
            move |source| LookupServerError::System {
                what,
                path: path.into(),
                source,
            }
        };
        listener.set_nonblocking(true).map_err(failed("set up"))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build();
        let runtime = runtime.map_err(failed("start an event loop for"))?;
        let listener = {
            let _inside = runtime.enter();
            UnixListener::from_std(listener).map_err(failed("watch"))?
        };
        let counters = Arc::new(Counters::default());
        let service = Arc::new(Service {
            index,
            counters: Arc::clone(&counters),
            uid: file.uid()?,
            secret: secret.into(),
            reader_secret: reader_secret.into(),
            newest: watch::Sender::new(0),
        });
        let (stop, stopped) = oneshot::channel();
        let thread = thread::Builder::new().name("lmcache-lookup".into());
        let thread = thread.spawn(move || run(&runtime, listener, service, stopped));
        let thread = thread.map_err(failed("start a thread for"))?;
        let running = Running {
            pid: process::id(),
            stop,
            thread,
            file,
        };
        Ok(Self {
            path: path.into(),
            counters,
            running: Mutex::new(Some(running)),
        })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What has happened since the start; stays readable after [`LookupServer::close`].
    pub fn stats(&self) -> LookupServerStats {
        self.counters.read()
    }

    /// Stops answering, waits for the thread and removes the socket file. Idempotent.
    #[expect(
        clippy::disallowed_methods,
        reason = "the parent still owns what a fork only copied"
    )]
    pub fn close(&self) {
        let running = self
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(running) = running else { return };
        if running.pid != process::id() {
            // In a forked child: the thread was not copied, and the files are the parent's.
            mem::forget(running);
            return;
        }
        let Running {
            stop, thread, file, ..
        } = running;
        drop(stop);
        if thread.join().is_err() {
            tracing::error!(path = %self.path.display(), "the lookup server's thread had panicked");
        }
        drop(file);
    }
}

impl Drop for LookupServer {
    fn drop(&mut self) {
        self.close();
    }
}

struct Service {
    index: Arc<dyn LookupIndex>,
    counters: Arc<Counters>,
    uid: u32,
    /// What a peer must know; empty if nothing is asked of it.
    secret: Box<[u8]>,
    /// What a reader of the pool must know; empty if there are none.
    reader_secret: Box<[u8]>,
    /// The number of the newest connection that knew the secret.
    newest: watch::Sender<u64>,
}

fn run(
    runtime: &Runtime,
    listener: UnixListener,
    service: Arc<Service>,
    stopped: oneshot::Receiver<()>,
) {
    runtime.block_on(async {
        tokio::select! {
            () = accept(listener, service) => {}
            _ = stopped => {}
        }
    });
}

async fn accept(listener: UnixListener, service: Arc<Service>) {
    let mut peers: Vec<Peer> = Vec::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, most likely: the connection waits in the kernel meanwhile.
                tracing::warn!(%error, "cannot accept a lookup connection");
                time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        peers.retain(|peer| !peer.task.is_finished());
        let (greeting, served): (Vec<_>, Vec<_>) =
            (0..peers.len()).partition(|&at| peers[at].is_greeting());
        if greeting.len() >= MAX_GREETING {
            peers.remove(greeting[0]).end().await;
            count(&service.counters.refused_connections);
        }
        if served.len() >= MAX_CONNECTIONS && !evict_idle(&mut peers).await {
            count(&service.counters.refused_connections);
            continue;
        }
        let heard = Arc::new(Mutex::new(None));
        let service = Arc::clone(&service);
        let task = tokio::spawn({
            let heard = Arc::clone(&heard);
            async move { service.serve(stream, &heard).await }
        });
        peers.push(Peer { heard, task });
    }
}

/// When a connection was last heard of; `None` until it has introduced itself.
type Heard = Mutex<Option<Instant>>;

fn heard_now(heard: &Heard) {
    *heard.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
}

/// A connection, in the order in which they came.
struct Peer {
    heard: Arc<Heard>,
    task: JoinHandle<()>,
}

impl Peer {
    fn heard(&self) -> Option<Instant> {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_greeting(&self) -> bool {
        self.heard().is_none()
    }

    /// Its stream is closed once this returns.
    async fn end(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

/// Ends the connection that has been idle for longest; false if all are busy.
///
/// So connections that nobody uses any more cannot lock an engine out. One that is closed and still wanted
/// connects again.
async fn evict_idle(peers: &mut Vec<Peer>) -> bool {
    let served = peers.iter().enumerate();
    let served = served.filter_map(|(at, peer)| peer.heard().map(|heard| (heard, at)));
    let oldest = served
        .min()
        .filter(|(heard, _)| heard.elapsed() >= IDLE_MAKES_WAY);
    let Some((_, at)) = oldest else {
        return false;
    };
    peers.remove(at).end().await;
    true
}

/// Why a connection ended other than by the peer's leave.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error(transparent)]
    Zmtp(#[from] ZmtpError),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the client has made a newer connection")]
    Superseded,
}

impl Service {
    async fn serve(&self, mut stream: UnixStream, heard: &Heard) {
        // The folder keeps others out already; this holds even if somebody opens it.
        let known = stream
            .peer_cred()
            .is_ok_and(|peer| [self.uid, 0].contains(&peer.uid()));
        let greeted = match known {
            true => {
                let handshake = self.handshake(&mut stream);
                time::timeout(HANDSHAKE_DEADLINE, handshake).await
            }
            false => {
                count(&self.counters.refused_connections);
                return;
            }
        };
        let (inbox, role) = match greeted {
            Ok(Ok(greeted)) => greeted,
            Ok(Err(error)) => {
                count(match error {
                    ConnectionError::Zmtp(ZmtpError::Stranger) => &self.counters.strangers,
                    _ => &self.counters.refused_connections,
                });
                tracing::debug!(%error, "refused a lookup connection");
                return;
            }
            Err(_) => {
                count(&self.counters.refused_connections);
                return;
            }
        };
        heard_now(heard);
        count(&self.counters.connections);
        let outcome = match role {
            Role::Reader => {
                count(&self.counters.readers);
                self.converse(&mut stream, inbox, heard, role).await
            }
            Role::Client => {
                if !self.secret.is_empty() {
                    self.newest.send_modify(|newest| *newest += 1);
                }
                // From here on, so that one's own coming is no news.
                let mut newest = self.newest.subscribe();
                tokio::select! {
                    biased;
                    _ = newest.changed() => Err(ConnectionError::Superseded),
                    outcome = self.converse(&mut stream, inbox, heard, role) => outcome,
                }
            }
        };
        match outcome {
            Ok(()) | Err(ConnectionError::Io(_)) => {}
            Err(ConnectionError::Superseded) => count(&self.counters.superseded_connections),
            Err(ConnectionError::Zmtp(error)) => {
                count(match error {
                    ZmtpError::TooLarge { .. } => &self.counters.oversized,
                    _ => &self.counters.broken_connections,
                });
                tracing::warn!(%error, "ended a lookup connection");
            }
        }
    }

    async fn converse(
        &self,
        stream: &mut UnixStream,
        mut inbox: Vec<u8>,
        heard: &Heard,
        role: Role,
    ) -> Result<(), ConnectionError> {
        let mut outbox = Vec::new();
        let mut conversation = Conversation::new(&self.index, &self.counters, role);
        // Inside a message of several frames, of which this protocol has none.
        let mut in_parts = false;
        loop {
            let mut num_used = 0;
            while let Some((frame, used)) =
                zmtp::next_frame(&inbox[num_used..], wire::MAX_MESSAGE_BYTES)?
            {
                num_used += used;
                let Frame::Message { body, more } = frame else {
                    continue;
                };
                let is_part = mem::replace(&mut in_parts, more) || more;
                if more {
                    continue;
                }
                let reply = match is_part {
                    true => conversation.refuse(0, Status::Malformed),
                    false => conversation.answer(body),
                };
                match reply {
                    Reply::Nothing => {}
                    Reply::Bytes(body) => zmtp::put_message(&mut outbox, &body),
                    Reply::Descriptor(body, descriptor) => {
                        // What is owed goes first; a descriptor arrives with the bytes it is sent with.
                        stream.write_all(&outbox).await?;
                        outbox.clear();
                        zmtp::put_message(&mut outbox, &body);
                        let num_sent = send_along(stream, &outbox, &descriptor).await?;
                        outbox.drain(..num_sent);
                    }
                }
                if outbox.len() >= OUTBOX_BYTES {
                    stream.write_all(&outbox).await?;
                    outbox.clear();
                }
                // One peer's messages must not keep the others waiting.
                if num_used < inbox.len() {
                    task::yield_now().await;
                }
            }
            inbox.drain(..num_used);
            stream.write_all(&outbox).await?;
            outbox.clear();
            if inbox.len() < READ_BYTES {
                inbox.shrink_to(2 * READ_BYTES);
            }
            inbox.reserve(READ_BYTES);
            if stream.read_buf(&mut inbox).await? == 0 {
                return Ok(());
            }
            heard_now(heard);
        }
    }

    /// Exchanges greetings and READY; gives the bytes that came after them, and who the peer is.
    async fn handshake(&self, stream: &mut UnixStream) -> Result<(Vec<u8>, Role), ConnectionError> {
        stream.write_all(&zmtp::greeting()).await?;
        let mut greeting = [0; GREETING_BYTES];
        stream.read_exact(&mut greeting).await?;
        zmtp::check_greeting(&greeting)?;
        let mut inbox = Vec::with_capacity(READ_BYTES);
        let (used, role) = loop {
            match zmtp::next_frame(&inbox, 0)? {
                Some((Frame::Command(command), used)) => {
                    let identity = zmtp::check_ready(command, "DEALER")?;
                    break (used, self.role_of(identity)?);
                }
                Some((Frame::Message { .. }, _)) => return Err(ZmtpError::Ready.into()),
                None => {}
            }
            if stream.read_buf(&mut inbox).await? == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        };
        inbox.drain(..used);
        stream.write_all(&zmtp::ready("ROUTER", b"")).await?;
        Ok((inbox, role))
    }

    fn role_of(&self, identity: &[u8]) -> Result<Role, ZmtpError> {
        if !self.reader_secret.is_empty() && is_equal(identity, &self.reader_secret) {
            return Ok(Role::Reader);
        }
        if self.secret.is_empty() || is_equal(identity, &self.secret) {
            return Ok(Role::Client);
        }
        Err(ZmtpError::Stranger)
    }
}

/// Sends the first of these bytes, and a descriptor with them; how many.
async fn send_along(stream: &UnixStream, bytes: &[u8], along: &OwnedFd) -> io::Result<usize> {
    let send = || {
        let descriptors = [along.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        let bytes = [IoSlice::new(bytes)];
        sendmsg(stream, &bytes, &mut control, SendFlags::NOSIGNAL).map_err(io::Error::from)
    };
    stream.async_io(Interest::WRITABLE, send).await
}

/// Compares in the same time wherever the two differ.
fn is_equal(a: &[u8], b: &[u8]) -> bool {
    let differences = a.iter().zip(b).map(|(a, b)| a ^ b);
    a.len() == b.len() && differences.fold(0, |all, one| all | one) == 0
}
