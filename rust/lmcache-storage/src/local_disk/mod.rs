//! Chunks in folders on local disks, a file each, warm after a restart.
//!
//! Each chunk's file is an object of [`crate::object_form`], padded with zeros to whole pages. It is written
//! under another name and renamed, so it is there whole or not at all; and because a machine may stop between
//! the two reaching the disk, every read holds it against its checksum. The folder module says how processes
//! share a folder and keep its limit.
//!
//! Nothing here fails: what cannot be stored is not stored, what cannot be read is not there. Faults are
//! counted by reason.

mod chunk_io;
pub mod faults;
pub mod files;
mod folder;
mod held;
mod index;
mod put;
mod queue;
mod reading;
pub mod records;
mod uses;
mod walk;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lmcache_core::hash::ChunkHash;
use lmcache_core::hot_cache::Policy;
use lmcache_core::key::begins_with;
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::object::MemoryObj;
use parking_lot::Mutex;

use self::faults::{Fault, Faults, Trouble};
use self::files::{Files, Open, SystemFiles, read_fully};
use self::folder::{Folder, HASTE};
use self::put::{Batch, Put};
use self::queue::Queue;
use self::reading::{Answer, Reading};
use self::records::{Name, namespace_digest};
use crate::backend::Backend;
pub use crate::backend::{Arrival, Chunk};
use crate::object_form::{Header, PAGE_BYTES, key_text, namespace_in};

/// What a tier on disk is made of.
#[derive(Debug, Clone)]
pub struct Options {
    /// Folders; chunks are spread over them by their hash.
    pub paths: Vec<PathBuf>,
    /// Bytes that all of them together may take, whoever put them there.
    pub limit_bytes: u64,
    /// Which chunk leaves when the limit is reached.
    pub policy: Policy,
    /// Threads that read and write: as many requests are under way at the devices.
    pub threads: usize,
    /// Bytes of host memory that waiting puts may hold.
    pub max_queued_bytes: u64,
    /// Past the page cache, where the file system can.
    pub direct: bool,
    /// Whether a put waits until its bytes are on the device. Only a failing machine makes a difference, and
    /// then of what is still there, never of whether it is right.
    pub sync: bool,
    /// Whether [`LocalDisk::close`] removes what is stored, if no other process uses it.
    pub delete_on_close: bool,
}

impl Options {
    /// One folder, LRU, direct I/O, kept at the end.
    pub fn new(path: impl Into<PathBuf>, limit_bytes: u64) -> Self {
        Self {
            paths: vec![path.into()],
            limit_bytes,
            policy: Policy::default(),
            threads: 8,
            max_queued_bytes: 1 << 30,
            direct: true,
            sync: false,
            delete_on_close: false,
        }
    }
}

/// See the module documentation. Handles share one tier.
#[derive(Debug, Clone)]
pub struct LocalDisk(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    folders: Vec<Folder>,
    pool: LocalCpu,
    options: Options,
    faults: Arc<Faults>,
    queue: Arc<Queue>,
    /// Puts that are queued or under way.
    pending: Mutex<HashMap<Name, Pending>>,
    batches: AtomicU32,
    counts: Counts,
}

#[derive(Debug)]
struct Pending {
    namespace: Arc<str>,
    withdrawn: Arc<AtomicBool>,
}

#[derive(Debug, Default)]
struct Counts {
    put_chunks: AtomicU64,
    put_bytes: AtomicU64,
    refreshed_chunks: AtomicU64,
    dropped_chunks: AtomicU64,
    /// Puts that waited by name.
    named_chunks: AtomicU64,
    got_chunks: AtomicU64,
    got_bytes: AtomicU64,
}

fn add(count: &AtomicU64, by: u64) {
    count.fetch_add(by, Ordering::Relaxed);
}

impl LocalDisk {
    /// Opens the folders; chunks are read into `pool`.
    pub fn open(options: Options, pool: LocalCpu) -> Result<Self, Trouble> {
        Self::open_on(Arc::new(SystemFiles), options, pool)
    }

    /// As [`LocalDisk::open`], on other files than the system's.
    pub fn open_on(
        files: Arc<dyn Files>,
        options: Options,
        pool: LocalCpu,
    ) -> Result<Self, Trouble> {
        let faults = Arc::new(Faults::default());
        let limit = options.limit_bytes / options.paths.len().max(1) as u64;
        let open = |path: &PathBuf| {
            let (files, faults) = (Arc::clone(&files), Arc::clone(&faults));
            Folder::open(files, path, limit, options.policy, options.direct, faults)
        };
        let folders: Vec<Folder> = options.paths.iter().map(open).collect::<Result<_, _>>()?;
        if folders.is_empty() {
            return Err(Trouble::new(
                Fault::Gone,
                "no path is given; give one at least",
            ));
        }
        let queue = Queue::start(options.threads, options.max_queued_bytes)
            .map_err(|error| Trouble::system("start threads", &error))?;
        Ok(Self(Arc::new(Shared {
            folders,
            pool,
            options,
            faults,
            queue,
            pending: Mutex::new(HashMap::new()),
            batches: AtomicU32::new(held::new_number() as u32),
            counts: Counts::default(),
        })))
    }

    /// Takes chunks in, first to last, as far as the queue has room; how many are new. Does not wait for them
    /// to be written.
    ///
    /// Where the queue holds as many bytes as it may, chunks that the pool has under these names wait by name:
    /// they are taken from there in their turn, and dropped if they have left it.
    pub fn put(&self, namespace: &str, hashes: &[ChunkHash], chunks: Vec<Chunk>) -> usize {
        let shared = &self.0;
        let digest = namespace_digest(namespace);
        let batch = Arc::new(Batch {
            shared: Arc::clone(shared),
            namespace: digest,
            hashes: hashes.into(),
            number: shared.batches.fetch_add(1, Ordering::Relaxed),
        });
        let namespace: Arc<str> = namespace.into();
        let mut taken = 0;
        let num_chunks = hashes.len().min(chunks.len());
        for (i, (&hash, chunk)) in hashes.iter().zip(chunks).enumerate() {
            let name = Name {
                hash,
                namespace: digest,
            };
            if shared.folder(hash).index.lock().contains(&name) {
                add(&shared.counts.refreshed_chunks, 1);
                continue;
            }
            let withdrawn = Arc::new(AtomicBool::new(false));
            let pending = Pending {
                namespace: Arc::clone(&namespace),
                withdrawn: Arc::clone(&withdrawn),
            };
            match shared.pending.lock().entry(name) {
                Entry::Vacant(vacant) => {
                    vacant.insert(pending);
                }
                // What was removed while it waited stores nothing: the new one takes its place.
                Entry::Occupied(mut of) if of.get().withdrawn.load(Ordering::Relaxed) => {
                    of.insert(pending);
                }
                Entry::Occupied(_) => continue,
            }
            let bytes = chunk.object.len() as u64;
            let by_name = || {
                let is_in_pool = !shared.pool.get(&namespace, &[hash]).is_empty();
                is_in_pool.then(|| shared.queue.place(None)).flatten()
            };
            let held = shared.queue.place(Some(bytes));
            let holds = held.is_some();
            let Some(place) = held.or_else(by_name) else {
                shared.end_put(&name, &withdrawn);
                // Behind a gap nothing is found.
                add(&shared.counts.dropped_chunks, (num_chunks - i) as u64);
                break;
            };
            add(&shared.counts.named_chunks, u64::from(!holds));
            let put = Put {
                batch: Arc::clone(&batch),
                name,
                namespace: Arc::clone(&namespace),
                position: u16::try_from(i).unwrap_or(u16::MAX),
                object: holds.then_some(chunk.object),
                form: chunk.form,
                num_tokens: chunk.num_tokens,
                withdrawn,
            };
            shared.queue.put(place, Box::new(move || put.run()));
            taken += 1;
        }
        taken
    }

    /// How many chunks of the chain are stored, counted from its first to the first gap.
    pub fn contains_prefix(&self, namespace: &str, hashes: &[ChunkHash]) -> usize {
        // What others have put and cleared counts from now on; a page is read for it.
        self.0.folders.iter().for_each(Folder::look_for_news);
        let digest = namespace_digest(namespace);
        let count = self.0.known_prefix(digest, hashes);
        self.0.note_use(digest, &hashes[..count]);
        count
    }

    /// Reads chunks, from the first to the first gap, and waits for them until `within` has passed. Those that
    /// came by then are there.
    pub fn get(&self, namespace: &str, hashes: &[ChunkHash], within: Duration) -> Vec<Arrival> {
        self.get_into(&self.0.pool, namespace, hashes, within)
    }

    /// As [`LocalDisk::get`], into memory of another pool.
    pub fn get_into(
        &self,
        pool: &LocalCpu,
        namespace: &str,
        hashes: &[ChunkHash],
        within: Duration,
    ) -> Vec<Arrival> {
        let due = Instant::now().checked_add(within);
        let num_chunks = self.contains_prefix(namespace, hashes);
        let reading = Arc::new(Reading::new(num_chunks));
        let namespace: Arc<str> = namespace.into();
        for (at, &hash) in hashes[..num_chunks].iter().enumerate() {
            let (shared, namespace) = (Arc::clone(&self.0), Arc::clone(&namespace));
            let pool = pool.clone();
            let answer = Answer {
                reading: Arc::clone(&reading),
                at,
                arrival: None,
            };
            let job = move || {
                let mut answer = answer;
                if at < answer.reading.gap.load(Ordering::Relaxed) {
                    answer.arrival = shared.read(&pool, &namespace, hash, &answer.reading, at);
                }
            };
            self.0.queue.read(Box::new(job));
        }
        let arrivals = reading.wait(due);
        if arrivals.len() < reading.gap.load(Ordering::Relaxed) {
            let found = format!(
                "{} of {num_chunks} chunks within {within:?}",
                arrivals.len()
            );
            self.0
                .faults
                .note("get", &Trouble::new(Fault::Deadline, found));
        }
        reading.end();
        arrivals
    }

    /// Forgets a chunk, one that is being put included; whether it was there.
    pub fn remove(&self, namespace: &str, hash: ChunkHash) -> bool {
        let shared = &self.0;
        let name = Name::of(namespace, hash);
        let withdrawn = shared.withdraw(|each, _| *each == name);
        let folder = shared.folder(hash);
        folder.look_for_news();
        if folder.index.lock().entry(&name).is_none() && withdrawn == 0 {
            return false;
        }
        match folder.remove(name, HASTE * 10) {
            Ok(removed) => removed || withdrawn > 0,
            Err(trouble) => {
                shared.faults.note("remove", &trouble);
                folder.index.lock().mark_bad(&name);
                withdrawn > 0
            }
        }
    }

    /// Removes every chunk of every process, or those whose namespace begins with `prefix`; see [`begins_with`].
    /// How many.
    pub fn clear(&self, prefix: Option<&str>) -> usize {
        self.0
            .clear(|namespace| prefix.is_none_or(|prefix| begins_with(namespace, prefix)))
    }

    /// Removes every chunk that [`LocalDisk::clear`] of that prefix would leave. How many.
    pub fn retain(&self, prefix: &str) -> usize {
        self.0.clear(|namespace| !begins_with(namespace, prefix))
    }

    /// Waits until every put taken in before is done; false if the time ran out.
    pub fn flush(&self, within: Duration) -> bool {
        self.0.queue.flush(within)
    }

    /// Ends the tier, pending puts done first as far as there is time. What is stored stays, unless the options
    /// say otherwise. Idempotent.
    pub fn close(&self, within: Duration) -> bool {
        let in_time = self.0.queue.close(within);
        for folder in &self.0.folders {
            match folder.close(self.0.options.delete_on_close) {
                Ok(()) => {}
                Err(trouble) if trouble.fault == Fault::Withdrawn => {}
                Err(trouble) => self.0.faults.note("close", &trouble),
            }
        }
        in_time
    }

    /// Counters by name.
    pub fn stats(&self) -> BTreeMap<String, u64> {
        let shared = &self.0;
        let (queued_chunks, queued_bytes, waiting_chunks) = shared.queue.queued();
        let counts = &shared.counts;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let sum = |of: fn(&Folder) -> u64| shared.folders.iter().map(of).sum::<u64>();
        let counted = [
            ("put_chunks", of(&counts.put_chunks)),
            ("put_bytes", of(&counts.put_bytes)),
            ("refreshed_chunks", of(&counts.refreshed_chunks)),
            ("dropped_chunks", of(&counts.dropped_chunks)),
            ("got_chunks", of(&counts.got_chunks)),
            ("got_bytes", of(&counts.got_bytes)),
            ("queued_chunks", queued_chunks),
            ("queued_bytes", queued_bytes),
            ("waiting_chunks", waiting_chunks),
            ("named_chunks", of(&counts.named_chunks)),
            (
                "evicted_chunks",
                sum(|folder| folder.evicted.load(Ordering::Relaxed)),
            ),
            ("chunks", sum(|folder| folder.index.lock().len() as u64)),
            ("used_bytes", sum(Folder::used)),
            ("limit_bytes", shared.options.limit_bytes),
            (
                "direct",
                sum(|folder| u64::from(folder.direct.load(Ordering::Relaxed))),
            ),
        ];
        let counted = counted
            .into_iter()
            .map(|(name, count)| (name.to_owned(), count));
        let faults = shared.faults.counts();
        counted
            .chain(faults.map(|(name, count)| (format!("faults_{name}"), count)))
            .collect()
    }

    /// Where a chunk's file is, or would be.
    pub fn path_of(&self, namespace: &str, hash: ChunkHash) -> PathBuf {
        self.0.folder(hash).path_of(&Name::of(namespace, hash))
    }

    /// Faults by reason.
    pub fn faults(&self) -> &Faults {
        &self.0.faults
    }
}

impl Shared {
    fn folder(&self, hash: ChunkHash) -> &Folder {
        &self.folders[self.folder_of(hash)]
    }

    fn folder_of(&self, hash: ChunkHash) -> usize {
        // Other bits than those that choose the folder's subfolder.
        usize::from(hash.0[1]) % self.folders.len()
    }

    fn known_prefix(&self, namespace: [u8; 16], hashes: &[ChunkHash]) -> usize {
        if let [folder] = &self.folders[..] {
            return folder.index.lock().longest_prefix(namespace, hashes);
        }
        let is_known = |hash: &&ChunkHash| {
            let name = Name {
                hash: **hash,
                namespace,
            };
            self.folder(**hash).index.lock().contains(&name)
        };
        let count = hashes.iter().take_while(is_known).count();
        self.touch(namespace, &hashes[..count]);
        count
    }

    /// Notes that stored chunks were used, for the next start, and has the catalogue told where that is due.
    fn note_use(self: &Arc<Self>, namespace: [u8; 16], hashes: &[ChunkHash]) {
        for (at, folder) in self.folders.iter().enumerate() {
            let chunks = hashes.iter().enumerate();
            let ours = chunks.filter(|(_, hash)| self.folder_of(**hash) == at);
            let named = ours.map(|(position, &hash)| {
                let position = u16::try_from(position).unwrap_or(u16::MAX);
                (position, Name { hash, namespace })
            });
            let is_due = folder.uses.lock().note(named.collect());
            if let Some(place) = is_due.then(|| self.queue.place(None)).flatten() {
                let shared = Arc::clone(self);
                let tell = move || {
                    if let Err(trouble) = shared.folders[at].tell_uses() {
                        shared.faults.note("tell", &trouble);
                    }
                };
                self.queue.put(place, Box::new(tell));
            }
        }
    }

    fn touch(&self, namespace: [u8; 16], hashes: &[ChunkHash]) {
        if let [folder] = &self.folders[..] {
            return folder.index.lock().touch(namespace, hashes);
        }
        for (at, folder) in self.folders.iter().enumerate() {
            let ours = |hash: &&ChunkHash| self.folder_of(**hash) == at;
            let ours: Vec<ChunkHash> = hashes.iter().filter(ours).copied().collect();
            folder.index.lock().touch(namespace, &ours);
        }
    }

    /// A put is pending no more. Another one of its name may have taken its place, and stays.
    fn end_put(&self, name: &Name, withdrawn: &Arc<AtomicBool>) {
        if let Entry::Occupied(pending) = self.pending.lock().entry(*name)
            && Arc::ptr_eq(&pending.get().withdrawn, withdrawn)
        {
            pending.remove();
        }
    }

    /// Ends puts that are queued or under way; how many.
    fn withdraw(&self, goes: impl Fn(&Name, &str) -> bool) -> usize {
        let pending = self.pending.lock();
        let chosen = pending
            .iter()
            .filter(|(name, put)| goes(name, &put.namespace));
        let newly = chosen.filter(|(_, put)| !put.withdrawn.swap(true, Ordering::Relaxed));
        newly.count()
    }

    fn clear(&self, goes: impl Fn(&str) -> bool) -> usize {
        self.withdraw(|_, namespace| goes(namespace));
        let mut removed = 0;
        for folder in &self.folders {
            let mut verdicts = HashMap::new();
            let cleared = folder.clear(|name| {
                if let Some(verdict) = verdicts.get(&name.namespace) {
                    return *verdict;
                }
                match namespace_of(folder, name) {
                    Some(namespace) => *verdicts.entry(name.namespace).or_insert(goes(&namespace)),
                    // Nobody could use it anyway.
                    None => true,
                }
            });
            match cleared {
                Ok(count) => removed += count,
                Err(trouble) if trouble.fault == Fault::Withdrawn => {}
                Err(trouble) => self.faults.note("clear", &trouble),
            }
        }
        removed
    }

    fn read(
        &self,
        pool: &LocalCpu,
        namespace: &str,
        hash: ChunkHash,
        reading: &Reading,
        at: usize,
    ) -> Option<Arrival> {
        let name = Name::of(namespace, hash);
        let folder = self.folder(hash);
        let room = |bytes: usize| {
            reading.place(at, || {
                let chunk = pool.allocate(&[bytes]).and_then(|mut one| one.pop());
                chunk.ok_or_else(|| {
                    Trouble::new(Fault::NoMemory, format!("no room for {bytes} bytes"))
                })
            })
        };
        match chunk_io::read(folder, &name, &key_text(namespace, hash), &room) {
            Ok((chunk, description)) => {
                add(&self.counts.got_chunks, 1);
                add(&self.counts.got_bytes, chunk.len() as u64);
                Some(Arrival { chunk, description })
            }
            Err(trouble) if trouble.fault == Fault::Withdrawn => None,
            Err(trouble) => {
                self.faults.note("get", &trouble);
                match trouble.fault {
                    Fault::NoMemory => {}
                    // It is found no more, whether or not it can be removed.
                    Fault::Defect(_) | Fault::Gone => {
                        if let Err(trouble) = folder.remove(name, HASTE) {
                            self.faults.note("remove", &trouble);
                            folder.index.lock().mark_bad(&name);
                        }
                    }
                    // The file may be right, and the fault ours: too many open files, say.
                    _ => folder.index.lock().mark_bad(&name),
                }
                None
            }
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.queue.close(Duration::ZERO);
        for folder in &self.folders {
            let _ = folder.close(false);
        }
    }
}

/// The namespace of a chunk, as its own file tells it.
fn namespace_of(folder: &Folder, name: &Name) -> Option<String> {
    let file = folder
        .files
        .open(&folder.path_of(name), Open::Read { direct: false })
        .ok()?;
    let mut bytes = vec![0; PAGE_BYTES];
    let count = read_fully(&*file, &mut bytes, 0).ok()?;
    let header_bytes = Header::bytes_of(&bytes[..count]).ok()?;
    bytes.resize(header_bytes, 0);
    read_fully(&*file, &mut bytes, 0).ok()?;
    let header = Header::parse(&bytes).ok()?;
    let namespace = namespace_in(&header.description.key)?;
    (namespace_digest(namespace) == name.namespace).then(|| namespace.to_owned())
}

impl Backend for LocalDisk {
    fn name(&self) -> &'static str {
        "local_disk"
    }

    fn submit_put(&self, namespace: &str, hashes: &[ChunkHash], objects: &[MemoryObj]) {
        self.put(namespace, hashes, objects.iter().map(Chunk::from).collect());
    }

    fn contains_prefix(&self, namespace: &str, hashes: &[ChunkHash]) -> usize {
        LocalDisk::contains_prefix(self, namespace, hashes)
    }

    fn get_blocking(&self, namespace: &str, hashes: &[ChunkHash]) -> Vec<MemoryObj> {
        let arrivals = self.get(namespace, hashes, DEADLINE);
        arrivals.into_iter().map(MemoryObj::from).collect()
    }

    fn remove(&self, namespace: &str, hash: ChunkHash) -> bool {
        LocalDisk::remove(self, namespace, hash)
    }
}

/// After so long a read is a miss, where its caller names no deadline.
const DEADLINE: Duration = Duration::from_secs(5);
