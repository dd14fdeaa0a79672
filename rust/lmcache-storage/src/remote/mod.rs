//! Chunks on servers: one value each, shared by all that reach the server, warm for whoever comes next.
//!
//! [`client`] is what is asked of a server, [`RemoteTier`] what makes a tier of it: puts that wait are bounded in
//! bytes, reads have a deadline, a server that fails is left alone until a probe comes through, and what comes
//! back is held against its checksum. One runtime of two threads for each tier does the work; engines wait, if
//! at all, with their deadline.
//!
//! Nothing here fails: what cannot be stored is not stored, what cannot be read is not there. Faults are counted
//! by reason.

mod breaker;
pub mod client;
mod faults;
mod landing;
pub mod name;
#[cfg(feature = "object-store")]
pub mod object_store;
mod puts;
mod reads;
#[cfg(feature = "redis")]
pub mod redis;
mod sweeps;
mod value;

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use bytes::Bytes;
use lmcache_core::hash::ChunkHash;
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::object::MemoryObj;
use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use self::breaker::{Breaker, Hold, probe_waits};
use self::client::{Answer, Client, Finding, Page, Refusal};
use self::faults::Faults;
pub use self::landing::Landing;
use self::name::{Names, digest_text};
use self::puts::Line;
use self::sweeps::Sweep;
pub use self::value::Serde;
use crate::backend::{Arrival, Backend, Chunk};

/// What a remote tier is made of.
#[derive(Debug, Clone)]
pub struct Options {
    /// What all names begin with; the operator's.
    pub key_prefix: String,
    /// Reads under way at a time; puts have half as many beside them.
    pub operations: usize,
    /// After so long one operation has failed.
    pub deadline: Duration,
    /// How long the server keeps a value; for ever unless given.
    pub ttl: Option<Duration>,
    /// Bytes of host memory that waiting puts may hold.
    pub max_queued_bytes: u64,
    /// Bytes of the largest value.
    pub max_value_bytes: u64,
    /// How payloads lie in their values.
    pub serde: Serde,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            key_prefix: String::new(),
            operations: 8,
            deadline: Duration::from_secs(5),
            ttl: None,
            max_queued_bytes: 1 << 30,
            max_value_bytes: MAX_VALUE_BYTES,
            serde: Serde::Naive,
        }
    }
}

/// A server that a URL names, not yet connected to.
#[derive(Debug)]
pub struct Server {
    /// Speaks to it.
    pub client: Arc<dyn Client>,
    /// What the URL wants all names to begin with.
    pub key_prefix: String,
}

/// Variables of the process in which a URL's credentials are looked for, as far as they are set.
pub type Credentials = BTreeMap<String, String>;

/// The server that a URL names. Connections are made as they are needed: one that is down is no error here.
///
/// # Errors
/// What is wrong with the URL, in words without its credentials.
pub fn connect(url: &str, operations: usize, credentials: &Credentials) -> Result<Server, String> {
    let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
    #[cfg(feature = "redis")]
    if redis::SCHEMES.contains(&scheme) {
        return redis::connect(url, operations, credentials);
    }
    #[cfg(feature = "object-store")]
    if object_store::SCHEMES.contains(&scheme) {
        return object_store::connect(url, credentials);
    }
    let known = known_schemes().join(", ");
    // What stands there in place of a scheme may be a password.
    let found = match scheme
        .bytes()
        .all(|byte| byte.is_ascii_lowercase() || byte == b'-')
    {
        true => format!("{scheme:?}"),
        false => "that this URL begins with".to_owned(),
    };
    Err(format!(
        "no remote tier has the scheme {found}; there are {known}"
    ))
}

fn known_schemes() -> Vec<&'static str> {
    let mut schemes = Vec::new();
    #[cfg(feature = "redis")]
    schemes.extend(redis::SCHEMES);
    #[cfg(feature = "object-store")]
    schemes.extend(object_store::SCHEMES);
    schemes
}

/// See the module documentation. Handles share one tier.
#[derive(Debug, Clone)]
pub struct RemoteTier(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    client: Arc<dyn Client>,
    options: Options,
    names: Names,
    pool: LocalCpu,
    faults: Faults,
    breaker: Breaker,
    /// Whether puts are offered.
    hold: Hold,
    /// Whether reads are, to a server that does not let us.
    read_hold: Hold,
    line: Line,
    read_permits: Arc<Semaphore>,
    put_permits: Arc<Semaphore>,
    /// Namespaces that were used, by what names have of them.
    namespaces: Mutex<HashMap<String, Arc<str>>>,
    /// What is to be forgotten, and is not yet.
    owed: Mutex<Vec<Sweep>>,
    is_probing: AtomicBool,
    is_closed: AtomicBool,
    handle: Handle,
    /// There until the close.
    runtime: Mutex<Option<Runtime>>,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    put_chunks: AtomicU64,
    put_bytes: AtomicU64,
    sent_bytes: AtomicU64,
    refreshed_chunks: AtomicU64,
    dropped_chunks: AtomicU64,
    got_chunks: AtomicU64,
    got_bytes: AtomicU64,
    received_bytes: AtomicU64,
    skipped_operations: AtomicU64,
}

fn add(count: &AtomicU64, by: u64) {
    count.fetch_add(by, Ordering::Relaxed);
}

impl RemoteTier {
    /// A tier on a server; chunks are read into `pool`.
    ///
    /// # Errors
    /// The system gives no threads.
    pub fn open(client: Arc<dyn Client>, options: Options, pool: LocalCpu) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("lmcache_rs-net")
            .enable_all()
            .build()?;
        let operations = options.operations.max(1);
        Ok(Self(Arc::new(Shared {
            client,
            names: Names::new(&options.key_prefix, options.serde),
            pool,
            faults: Faults::default(),
            breaker: Breaker::default(),
            hold: Hold::default(),
            read_hold: Hold::default(),
            line: Line::new(options.max_queued_bytes),
            read_permits: Arc::new(Semaphore::new(operations)),
            put_permits: Arc::new(Semaphore::new(operations.div_ceil(2))),
            namespaces: Mutex::default(),
            owed: Mutex::default(),
            is_probing: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            handle: runtime.handle().clone(),
            runtime: Mutex::new(Some(runtime)),
            counts: Counts::default(),
            options: Options {
                operations,
                ..options
            },
        })))
    }

    /// Takes chunks in, first to last, as far as there is room; how many, those that the server turns out to have
    /// included. Does not wait for them to be written.
    pub fn put(&self, namespace: &str, hashes: &[ChunkHash], chunks: Vec<Chunk>) -> usize {
        self.0.put(namespace, hashes, chunks)
    }

    /// How many chunks of the chain are stored, counted from its first to the first gap.
    pub fn contains_prefix(&self, namespace: &str, hashes: &[ChunkHash]) -> usize {
        let shared = &self.0;
        if hashes.is_empty() || !shared.answers_reads() {
            return 0;
        }
        let names = shared.names.of_each(&shared.know(namespace), hashes);
        let asked = Arc::clone(shared);
        let answer = async move { asked.call("contains", asked.client.prefix(&names)).await };
        let found = shared.wait("contains", shared.options.deadline, answer);
        found.unwrap_or(0).min(hashes.len())
    }

    /// Reads chunks, from the first to the first gap, and waits for them until `within` has passed. Those that
    /// came by then are there.
    pub fn get(&self, namespace: &str, hashes: &[ChunkHash], within: Duration) -> Vec<Arrival> {
        self.0.get(&self.0.pool, namespace, hashes, within)
    }

    /// As [`RemoteTier::get`], into memory of another pool.
    pub fn get_into(
        &self,
        pool: &LocalCpu,
        namespace: &str,
        hashes: &[ChunkHash],
        within: Duration,
    ) -> Vec<Arrival> {
        self.0.get(pool, namespace, hashes, within)
    }

    /// Forgets a chunk, one that is being put included; whether it was there.
    pub fn remove(&self, namespace: &str, hash: ChunkHash) -> bool {
        let shared = &self.0;
        let deadline = shared.options.deadline;
        let name = shared.names.of(namespace, hash);
        let withdrawn = shared.line.withdraw(deadline, |each, _| each == name);
        if !shared.is_in_use() {
            return withdrawn > 0;
        }
        let asked = Arc::clone(shared);
        let answer = async move { asked.call("remove", asked.client.remove(&[name])).await };
        let removed = shared.wait("remove", deadline, answer);
        removed.unwrap_or(0) + withdrawn > 0
    }

    /// Removes every chunk of every process, or those whose namespace begins with `prefix`; see
    /// [`lmcache_core::key::begins_with`]. How many.
    ///
    /// Where the server is out of reach, it is done as soon as it is back; until then nothing is read.
    pub fn clear(&self, prefix: Option<&str>) -> usize {
        self.0.forget(match prefix {
            None => Sweep::All,
            Some(prefix) => Sweep::Clear(prefix.to_owned()),
        })
    }

    /// Removes every chunk that [`RemoteTier::clear`] of that prefix would leave. How many.
    pub fn retain(&self, prefix: &str) -> usize {
        self.0.forget(Sweep::Retain(prefix.to_owned()))
    }

    /// Waits until every put taken in before is done; false if the time ran out.
    pub fn flush(&self, within: Duration) -> bool {
        self.0.line.flush(within)
    }

    /// Ends the tier, pending puts done first as far as there is time. What is stored stays. Idempotent.
    pub fn close(&self, within: Duration) -> bool {
        let in_time = self.0.line.flush(within);
        self.0.is_closed.store(true, Ordering::Relaxed);
        let runtime = self.0.runtime.lock().take();
        if let Some(runtime) = runtime {
            runtime.shutdown_timeout(END_WITHIN);
        }
        in_time
    }

    /// Counters by name.
    pub fn stats(&self) -> BTreeMap<String, u64> {
        let shared = &self.0;
        let counts = &shared.counts;
        let (queued_chunks, queued_bytes) = shared.line.queued();
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counted = [
            ("put_chunks", of(&counts.put_chunks)),
            ("put_bytes", of(&counts.put_bytes)),
            ("sent_bytes", of(&counts.sent_bytes)),
            ("refreshed_chunks", of(&counts.refreshed_chunks)),
            ("dropped_chunks", of(&counts.dropped_chunks)),
            ("got_chunks", of(&counts.got_chunks)),
            ("got_bytes", of(&counts.got_bytes)),
            ("received_bytes", of(&counts.received_bytes)),
            ("skipped_operations", of(&counts.skipped_operations)),
            ("queued_chunks", queued_chunks),
            ("queued_bytes", queued_bytes),
            ("outages", shared.breaker.num_opened()),
            ("out_of_reach", u64::from(!shared.breaker.is_closed())),
        ];
        let counted = counted.map(|(name, count)| (name.to_owned(), count));
        let faults = shared.faults.counts().into_iter();
        let faults = faults.map(|(name, count)| (format!("faults_{name}"), count));
        counted.into_iter().chain(faults).collect()
    }

    /// What there is to log since the last call, rate-limited by kind.
    pub fn take_lines(&self) -> Vec<String> {
        self.0.faults.take_lines()
    }

    /// What there is to say of the server, asked now whatever its past. One that is not reached is left alone from
    /// then on, until a probe comes through.
    pub fn health(&self, within: Duration) -> Vec<Finding> {
        let shared = Arc::clone(&self.0);
        let answer = async move {
            let asked = timeout(within, shared.client.health()).await;
            let found = asked.unwrap_or(Err(Refusal::Timeout));
            shared.learn("health", &found);
            if found.as_ref().is_err_and(Refusal::is_outage) && shared.breaker.open() {
                shared.probe();
            }
            Some(found)
        };
        let refused = |refusal: Refusal| {
            vec![Finding {
                what: "reach",
                ok: false,
                words: refusal.to_string(),
            }]
        };
        match self.0.wait("health", within, answer) {
            Some(Ok(findings)) => findings,
            Some(Err(refusal)) => refused(refusal),
            None => refused(Refusal::Timeout),
        }
    }

    /// One page of the names of chunks that the server has, with the bytes of each; see [`Client::list`].
    ///
    /// # Errors
    /// The server refuses.
    pub fn list_page(&self, cursor: Option<String>, within: Duration) -> Result<Page, Refusal> {
        let shared = Arc::clone(&self.0);
        let answer = async move {
            let asked = timeout(within, shared.client.list(shared.names.root(), cursor)).await;
            Some(asked.unwrap_or(Err(Refusal::Timeout)))
        };
        let page = self.0.wait("list", within, answer);
        page.unwrap_or(Err(Refusal::Timeout))
    }

    /// What lies under a name, or the first `max_bytes` of it, for whoever looks into the store.
    ///
    /// # Errors
    /// The server refuses.
    pub fn begin(
        &self,
        name: String,
        max_bytes: u64,
        within: Duration,
    ) -> Result<Option<Bytes>, Refusal> {
        let shared = Arc::clone(&self.0);
        let answer = async move {
            let asked = timeout(within, shared.client.begin(&name, max_bytes)).await;
            Some(asked.unwrap_or(Err(Refusal::Timeout)))
        };
        let begin = self.0.wait("begin", within, answer);
        begin.unwrap_or(Err(Refusal::Timeout))
    }

    /// Removes what lies under names; how many were there.
    ///
    /// # Errors
    /// The server refuses.
    pub fn remove_names(&self, names: Vec<String>, within: Duration) -> Result<usize, Refusal> {
        let shared = Arc::clone(&self.0);
        let answer = async move {
            let asked = timeout(within, shared.client.remove(&names)).await;
            Some(asked.unwrap_or(Err(Refusal::Timeout)))
        };
        let removed = self.0.wait("remove", within, answer);
        removed.unwrap_or(Err(Refusal::Timeout))
    }

    /// The name under which a chunk is stored, or would be.
    pub fn name_of(&self, namespace: &str, hash: ChunkHash) -> String {
        self.0.names.of(namespace, hash)
    }
}

impl Shared {
    /// Whether the server is asked at all.
    fn is_in_use(&self) -> bool {
        self.breaker.is_closed()
            && self.owed.lock().is_empty()
            && !self.is_closed.load(Ordering::Relaxed)
    }

    /// As [`Shared::is_in_use`], for reads; one that is not begun is counted.
    fn answers_reads(&self) -> bool {
        let answers = self.is_in_use() && self.read_hold.lets_through();
        if !answers {
            add(&self.counts.skipped_operations, 1);
        }
        answers
    }

    /// Remembers a namespace, so that nobody need read whose a chunk is.
    fn know(&self, namespace: &str) -> Arc<str> {
        let mut known = self.namespaces.lock();
        if known.len() >= MAX_NAMESPACES {
            known.clear();
        }
        let of_digest = known.entry(digest_text(namespace));
        Arc::clone(of_digest.or_insert_with(|| namespace.into()))
    }

    /// One operation with its deadline.
    async fn ask<T>(&self, answer: Answer<'_, T>) -> Result<T, Refusal> {
        let asked = timeout(self.options.deadline, answer).await;
        asked.unwrap_or(Err(Refusal::Timeout))
    }

    /// Counts what came of an operation, and draws the conclusions.
    fn learn<T>(self: &Arc<Self>, verb: &'static str, outcome: &Result<T, Refusal>) {
        let refusal = match outcome {
            Ok(_) => return self.breaker.note_success(),
            Err(refusal) => refusal,
        };
        self.faults.note(verb, refusal.name(), &refusal.to_string());
        if verb == "put" && refusal.stops_puts() {
            self.hold.note_refused();
        }
        if !refusal.is_outage() {
            // It was reached.
            self.breaker.note_success();
        } else if self.breaker.note_outage(refusal) {
            self.probe();
        }
    }

    /// One operation, unless the server is out of use; `None` if nothing came of it, which is counted.
    async fn call<T>(self: &Arc<Self>, verb: &'static str, answer: Answer<'_, T>) -> Option<T> {
        if !self.is_in_use() {
            add(&self.counts.skipped_operations, 1);
            return None;
        }
        let outcome = self.ask(answer).await;
        self.learn(verb, &outcome);
        if matches!(verb, "contains" | "get") {
            match &outcome {
                // Who may only ask what is there may read nothing.
                Ok(_) if verb == "get" => self.read_hold.note_taken(),
                Err(Refusal::Denied(_)) => self.read_hold.note_refused(),
                _ => {}
            }
        }
        outcome.ok()
    }

    /// Has work done on the tier's own threads, and waits for it no longer than is said.
    fn wait<T: Send + 'static>(
        &self,
        verb: &'static str,
        within: Duration,
        work: impl Future<Output = Option<T>> + Send + 'static,
    ) -> Option<T> {
        let (give, take) = sync_channel(1);
        self.handle.spawn(async move { give.send(work.await).ok() });
        match take.recv_timeout(within.saturating_add(GRACE)) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => {
                let found = format!("no answer within {within:?}");
                self.faults.note(verb, "deadline", &found);
                None
            }
            Err(RecvTimeoutError::Disconnected) => {
                if !self.is_closed.load(Ordering::Relaxed) {
                    self.faults.note(verb, "panicked", "a bug of ours");
                }
                None
            }
        }
    }

    fn forget(self: &Arc<Self>, sweep: Sweep) -> usize {
        if self.is_closed.load(Ordering::Relaxed) {
            return 0;
        }
        let mut owed = self.owed.lock();
        if !owed.contains(&sweep) {
            owed.push(sweep.clone());
        }
        drop(owed);
        let due = Instant::now() + SWEEP_WITHIN;
        self.line
            .withdraw(self.options.deadline, |_, namespace| sweep.takes(namespace));
        if !self.breaker.is_closed() {
            // The probe will do it.
            let found = "the server is out of reach; done as soon as it is back, misses until then";
            self.faults.note("clear", "unreachable", found);
            return 0;
        }
        let paying = Arc::clone(self);
        let answer = async move { paying.pay(&sweep).await };
        let left = due.saturating_duration_since(Instant::now());
        self.wait("clear", left, answer).unwrap_or(0)
    }

    /// Asks the server now and then until it answers and all that is owed to it is done.
    fn probe(self: &Arc<Self>) {
        if self.is_probing.swap(true, Ordering::Relaxed) {
            return;
        }
        let weak = Arc::downgrade(self);
        self.handle.spawn(async move {
            for wait in probe_waits() {
                sleep(wait).await;
                let Some(shared) = weak.upgrade() else { return };
                if shared.recover().await {
                    shared.is_probing.store(false, Ordering::Relaxed);
                    // What failed meanwhile found a probe under way.
                    if !shared.breaker.is_closed() || !shared.owed.lock().is_empty() {
                        shared.probe();
                    }
                    return;
                }
            }
        });
    }

    async fn recover(self: &Arc<Self>) -> bool {
        if !self.breaker.is_closed() {
            let name = [format!("{}probe", self.names.root())];
            match self.ask(self.client.prefix(&name)).await {
                Err(refusal) if refusal.is_outage() => return false,
                _ => self.breaker.close(),
            }
        }
        loop {
            let next = self.owed.lock().first().cloned();
            match next {
                None => return true,
                Some(sweep) => {
                    if self.pay(&sweep).await.is_none() {
                        return false;
                    }
                }
            }
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.get_mut().take() {
            // This may be one of its own threads.
            runtime.shutdown_background();
        }
    }
}

impl Backend for RemoteTier {
    fn name(&self) -> &'static str {
        "remote"
    }

    fn submit_put(&self, namespace: &str, hashes: &[ChunkHash], objects: &[MemoryObj]) {
        self.put(namespace, hashes, objects.iter().map(Chunk::from).collect());
    }

    fn contains_prefix(&self, namespace: &str, hashes: &[ChunkHash]) -> usize {
        RemoteTier::contains_prefix(self, namespace, hashes)
    }

    fn get_blocking(&self, namespace: &str, hashes: &[ChunkHash]) -> Vec<MemoryObj> {
        let arrivals = self.get(namespace, hashes, self.0.options.deadline);
        arrivals.into_iter().map(MemoryObj::from).collect()
    }

    fn remove(&self, namespace: &str, hash: ChunkHash) -> bool {
        RemoteTier::remove(self, namespace, hash)
    }
}

/// The largest value that any of the servers takes whole: Redis's limit, unless it was raised.
pub const MAX_VALUE_BYTES: u64 = 512 << 20;
/// Namespaces that are remembered.
const MAX_NAMESPACES: usize = 4096;
/// What an operation may take beyond its own deadline to say that it came.
const GRACE: Duration = Duration::from_millis(500);
/// How long a clear may take.
const SWEEP_WITHIN: Duration = Duration::from_secs(60);
/// How long the threads of a closed tier may take to end.
const END_WITHIN: Duration = Duration::from_millis(500);
