//! One folder that several processes share: who may change it, what is in it, and how many bytes that is.
//!
//! ```text
//! <path>/lmcache_rs.v1/   0700; every file 0600
//!   lock                  held (flock) around each change, for moments
//!   account               one page: bytes used, bytes reserved by each process, the step that is under way
//!   catalogue-<n>         what was put and removed, a record each, only ever appended to
//!   owners/<id>           locked by its process as long as that lives
//!   tmp/<id>-<n>          files that are being written
//!   00 … 3f/              the chunks, a file each
//! ```
//!
//! A change under the lock is announced in the account, made, appended to the catalogue, and then accounted
//! for. Whoever takes the lock after a process was killed finds the announcement and ends the step, so that
//! account, catalogue and files agree whenever the lock is free. After a start of the machine, where what was
//! written last may be lost in part and in any order, and whenever account or catalogue do not read right, the
//! folder is walked and both are written anew.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lmcache_core::hot_cache::Policy;
use parking_lot::Mutex;

use super::faults::{Fault, Faults, Trouble};
use super::files::{Files, Open, OpenFile, read_fully, write_fully};
use super::held::{Held, new_number, owner_path, read_account, remove_temps, shard_of, wait_for};
use super::index::Index;
use super::records::{Account, Intent, Name, RECORD_BYTES, Record, charge};
use super::uses::Uses;
use super::walk::Walk;
use crate::object_form::PAGE_BYTES;

/// Folders among which the chunks are spread.
pub(crate) const NUM_SHARDS: u8 = 64;
/// Name of our folder below the path that was asked for.
pub(crate) const ROOT: &str = "lmcache_rs.v1";
/// How long a change in the background waits for the folder's lock.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// How long a change does that somebody waits for.
pub(crate) const HASTE: Duration = Duration::from_millis(50);
/// Records of chunks that are gone, before the catalogue is written anew; fewer where the limit is small.
const MAX_DEAD_RECORDS: u64 = 1 << 16;
/// Victims whose files cannot be removed, before a put gives up.
const MAX_STUCK: usize = 8;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Folder {
    pub(crate) files: Arc<dyn Files>,
    pub(crate) root: PathBuf,
    pub(crate) limit: u64,
    pub(crate) policy: Policy,
    pub(crate) faults: Arc<Faults>,
    door: Mutex<Door>,
    /// This process's name in the folder.
    owner: AtomicU64,
    pub(crate) index: Mutex<Index>,
    /// What the catalogue does not know of yet.
    pub(super) uses: Mutex<Uses>,
    /// Charges of the files that this process is writing.
    pub(super) reserved: AtomicU64,
    num_temps: AtomicU64,
    /// Whether the folder was found missing: it is made anew.
    lost: AtomicBool,
    pub(crate) direct: AtomicBool,
    pub(crate) evicted: AtomicU64,
    pub(super) used: AtomicU64,
}

/// What a process holds open.
#[derive(Debug)]
pub(super) struct Door {
    pub(super) lock: Box<dyn OpenFile>,
    pub(super) account: Box<dyn OpenFile>,
    /// Held for its lock alone.
    _owner_file: Box<dyn OpenFile>,
    pub(super) owner: u64,
    pub(super) catalogue: Option<(u64, Box<dyn OpenFile>)>,
    closed: bool,
}

impl Folder {
    /// Opens a folder, and makes it if it is not there. What earlier processes left is found and counted.
    pub(crate) fn open(
        files: Arc<dyn Files>,
        path: &Path,
        limit: u64,
        policy: Policy,
        direct: bool,
        faults: Arc<Faults>,
    ) -> Result<Self, Trouble> {
        let root = path.join(ROOT);
        let door = Door::open(&*files, &root, Instant::now() + PATIENCE)?;
        let folder = Self {
            files,
            root,
            limit,
            policy,
            faults,
            owner: AtomicU64::new(door.owner),
            door: Mutex::new(door),
            index: Mutex::new(Index::new(policy)),
            uses: Mutex::new(Uses::new()),
            reserved: AtomicU64::new(0),
            num_temps: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            direct: AtomicBool::new(direct),
            evicted: AtomicU64::new(0),
            used: AtomicU64::new(0),
        };
        let mut held = folder.enter(PATIENCE)?;
        held.bury_dead()?;
        held.write_account()?;
        drop(held);
        if direct && let Err(error) = folder.probe_direct() {
            folder.direct.store(false, Ordering::Relaxed);
            tracing::warn!(
                "no direct I/O in {} ({error}); files go through the page cache",
                folder.root.display()
            );
        }
        Ok(folder)
    }

    /// Whether a page can be written and read past the page cache.
    fn probe_direct(&self) -> io::Result<()> {
        let path = self.temp_path();
        let mut page = super::chunk_io::Aligned::new(PAGE_BYTES);
        let outcome = (|| {
            let file = self.files.open(&path, Open::New { direct: true })?;
            write_fully(&*file, page.bytes_mut(), 0)?;
            let file = self.files.open(&path, Open::Read { direct: true })?;
            read_fully(&*file, page.bytes_mut(), 0)
        })();
        let _ = self.files.remove(&path);
        outcome.map(|_| ())
    }

    /// Where the chunk's file is, or would be.
    pub(crate) fn path_of(&self, name: &Name) -> PathBuf {
        let shard = format!("{:02x}", shard_of(name));
        self.root.join(shard).join(name.to_text())
    }

    /// A place for a file that is being written.
    pub(crate) fn temp_path(&self) -> PathBuf {
        let number = self.num_temps.fetch_add(1, Ordering::Relaxed);
        let owner = self.owner.load(Ordering::Relaxed);
        self.root.join("tmp").join(format!("{owner:016x}-{number}"))
    }

    /// Notes that the folder, or a part of it, was missing.
    pub(crate) fn note_lost(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }

    /// Charges of all files as this process last knew them.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes the folder's lock and brings the index up to date.
    pub(crate) fn enter(&self, patience: Duration) -> Result<Held<'_>, Trouble> {
        let due = Instant::now() + patience;
        let locked = || {
            Trouble::new(
                Fault::Locked,
                format!("no lock on {} within {patience:?}", self.root.display()),
            )
        };
        let mut door = self.door.try_lock_until(due).ok_or_else(locked)?;
        if door.closed {
            return Err(Trouble::new(Fault::Withdrawn, "the tier is closed"));
        }
        if self.lost.swap(false, Ordering::Relaxed) {
            match Door::open(&*self.files, &self.root, due) {
                Ok(opened) => {
                    self.owner.store(opened.owner, Ordering::Relaxed);
                    *door = opened;
                }
                Err(trouble) => {
                    self.note_lost();
                    return Err(trouble);
                }
            }
        }
        wait_for(&*door.lock, due)?;
        let mut held = Held {
            folder: self,
            door,
            account: Account::default(),
        };
        held.catch_up()?;
        Ok(held)
    }

    /// Follows what other processes have put since, without the folder's lock; a moment's work or none.
    pub(crate) fn look_for_news(&self) {
        let Some(mut door) = self.door.try_lock() else {
            return;
        };
        let Ok(Some(account)) = read_account(&*door.account) else {
            return;
        };
        if account.boot != self.files.boot() || door.closed {
            return;
        }
        self.used.store(account.used, Ordering::Relaxed);
        let mut index = self.index.lock();
        if account.generation != index.generation {
            drop((index, door));
            // The catalogue was written anew.
            let _ = self.enter(HASTE);
            return;
        }
        let (from, to) = (index.num_records, account.num_records);
        if from < to {
            drop(index);
            let Ok(records) = self.read_records(&mut door, account.generation, from, to) else {
                return;
            };
            index = self.index.lock();
            if index.num_records == from && index.generation == account.generation {
                records.iter().for_each(|record| index.apply(record));
            }
        }
    }

    pub(super) fn max_dead_records(&self) -> u64 {
        (self.limit / 256 / RECORD_BYTES as u64).clamp(64, MAX_DEAD_RECORDS)
    }

    pub(super) fn catalogue_path(&self, generation: u64) -> PathBuf {
        self.root.join(format!("catalogue-{generation:016x}"))
    }

    pub(super) fn read_records(
        &self,
        door: &mut Door,
        generation: u64,
        from: u64,
        to: u64,
    ) -> Result<Vec<Record>, Trouble> {
        let file = door.catalogue(self, generation)?;
        let mut bytes = vec![0; (to - from) as usize * RECORD_BYTES];
        let count = read_fully(file, &mut bytes, from * RECORD_BYTES as u64)
            .map_err(|error| Trouble::system("read the catalogue", &error))?;
        let records = bytes[..count]
            .chunks_exact(RECORD_BYTES)
            .map_while(Record::read);
        let records: Vec<Record> = records.collect();
        if records.len() as u64 == to - from {
            Ok(records)
        } else {
            Err(Trouble::new(Fault::Io, "the catalogue is damaged"))
        }
    }

    /// Makes room for a file of a batch and reserves it; what has to leave for it, leaves.
    pub(crate) fn reserve(&self, file_bytes: u64, batch: u32) -> Result<Reserved<'_>, Trouble> {
        let bytes = charge(file_bytes);
        let full = |found: String| Err(Trouble::new(Fault::Full, found));
        if bytes > self.limit {
            return full(format!(
                "a chunk of {file_bytes} bytes, a limit of {}",
                self.limit
            ));
        }
        let mut held = self.enter(PATIENCE)?;
        let (mut stuck, mut looked_for_dead) = (0, false);
        while held
            .account
            .used
            .saturating_add(held.account.reserved() + bytes)
            > self.limit
        {
            if !looked_for_dead
                && held
                    .account
                    .shares
                    .iter()
                    .any(|share| share.owner != held.door.owner && share.reserved > 0)
            {
                looked_for_dead = true;
                held.bury_dead()?;
                continue;
            }
            let victim = self.index.lock().victim(batch);
            let Some((name, file_bytes)) = victim else {
                return full(format!(
                    "{} bytes of {} are in use or reserved",
                    held.account.used + held.account.reserved(),
                    self.limit
                ));
            };
            match held.remove(name, file_bytes) {
                Ok(()) => {
                    self.evicted.fetch_add(1, Ordering::Relaxed);
                }
                Err(trouble) => {
                    self.faults.note("evict", &trouble);
                    self.index.lock().mark_bad(&name);
                    stuck += 1;
                    if stuck == MAX_STUCK {
                        return Err(trouble);
                    }
                }
            }
        }
        let reserved = Reserved {
            folder: self,
            bytes,
            clears: held.account.clears,
        };
        self.reserved.fetch_add(bytes, Ordering::Relaxed);
        held.write_account()?;
        Ok(reserved)
    }

    /// Gives a written file its name. False if another process has put the chunk meanwhile.
    pub(crate) fn publish(
        &self,
        temp: &Path,
        record: Record,
        reserved: Reserved<'_>,
        withdrawn: &AtomicBool,
    ) -> Result<bool, Trouble> {
        let mut held = self.enter(PATIENCE)?;
        if withdrawn.load(Ordering::Relaxed) || held.account.clears != reserved.clears {
            return Err(Trouble::new(
                Fault::Withdrawn,
                "cleared while it was written",
            ));
        }
        let known = self.index.lock().entry(&record.name);
        match known {
            None => {}
            Some(entry) if entry.bad => held.remove(record.name, entry.bytes)?,
            Some(_) => {
                drop(reserved);
                held.write_account()?;
                return Ok(false);
            }
        }
        held.begin(Intent::One(record))?;
        if let Err(error) = self.files.rename(temp, &self.path_of(&record.name)) {
            if error.kind() == ErrorKind::NotFound {
                self.note_lost();
            }
            held.begin(Intent::None)?;
            return Err(Trouble::system("rename", &error));
        }
        drop(reserved);
        held.finish(record)?;
        Ok(true)
    }

    /// Tells the catalogue what was used, so that it is known after a restart.
    pub(crate) fn tell_uses(&self) -> Result<(), Trouble> {
        let mut held = self.enter(PATIENCE)?;
        self.tell_uses_held(&mut held)
    }

    fn tell_uses_held(&self, held: &mut Held<'_>) -> Result<(), Trouble> {
        let index = self.index.lock();
        let bytes_of = |name: &Name| {
            let entry = index.entry(name).filter(|entry| !entry.bad)?;
            Some(entry.bytes)
        };
        let records = self.uses.lock().take(|| new_number() as u32, bytes_of);
        drop(index);
        match records.is_empty() {
            true => Ok(()),
            false => held.tell(&records),
        }
    }

    /// Removes a chunk; whether it was there.
    pub(crate) fn remove(&self, name: Name, patience: Duration) -> Result<bool, Trouble> {
        let mut held = self.enter(patience)?;
        let known = self.index.lock().entry(&name);
        match known {
            Some(entry) => held.remove(name, entry.bytes).map(|()| true),
            None => Ok(false),
        }
    }

    /// Removes the chunks that `goes` chooses, and nothing that is being written then is
    /// published. How many.
    pub(crate) fn clear(&self, mut goes: impl FnMut(&Name) -> bool) -> Result<usize, Trouble> {
        let mut held = self.enter(PATIENCE)?;
        held.account.clears += 1;
        held.begin(Intent::Many)?;
        let mut walk = Walk::of(self)?;
        let mut removed = 0;
        walk.chunks.retain(|found| {
            if !goes(&found.name) {
                return true;
            }
            match self.files.remove(&self.path_of(&found.name)) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    self.faults
                        .note("clear", &Trouble::system("remove", &error));
                    true
                }
                _ => {
                    removed += 1;
                    false
                }
            }
        });
        held.install(walk)?;
        Ok(removed)
    }

    /// Ends this process's part in the folder; removes the folder if that is asked for and it was the last.
    pub(crate) fn close(&self, delete: bool) -> Result<(), Trouble> {
        let mut held = match self.enter(HASTE * 20) {
            Ok(held) => held,
            Err(trouble) => {
                // Its lock ends with the process, and others bury it.
                if let Some(mut door) = self.door.try_lock() {
                    door.closed = true;
                }
                return Err(trouble);
            }
        };
        let owner = held.door.owner;
        let outcome = (|| {
            held.bury_dead()?;
            let alone = held.account.shares.iter().all(|share| share.owner == owner);
            if delete && alone {
                Walk::of(self)?.remove_all(self);
                self.remove_ours(owner);
                for name in ["owners", "tmp"] {
                    let _ = self.files.remove_folder(&self.root.join(name));
                }
                for name in ["account", "lock"] {
                    let _ = self.files.remove(&self.root.join(name));
                }
                let _ = self.files.remove_folder(&self.root);
                return Ok(());
            }
            let told = self.tell_uses_held(&mut held);
            held.account.shares.retain(|share| share.owner != owner);
            held.write_page().and(told)
        })();
        self.remove_ours(owner);
        held.door.closed = true;
        *self.index.lock() = Index::new(self.policy);
        outcome
    }

    fn remove_ours(&self, owner: u64) {
        remove_temps(self, |of| of == owner);
        let _ = self.files.remove(&owner_path(&self.root, owner));
    }
}

impl Door {
    fn open(files: &dyn Files, root: &Path, due: Instant) -> Result<Self, Trouble> {
        let system = |what: &str| {
            let what = format!("{what} in {}", root.display());
            move |error: io::Error| Trouble::system(&what, &error)
        };
        let shards = (0..NUM_SHARDS).map(|shard| format!("{shard:02x}"));
        for name in shards.chain(["tmp".into(), "owners".into()]) {
            files
                .make_folder(&root.join(name))
                .map_err(system("make folders"))?;
        }
        let lock = files
            .open(&root.join("lock"), Open::Shared)
            .map_err(system("open the lock"))?;
        let account = files
            .open(&root.join("account"), Open::Shared)
            .map_err(system("open the account"))?;
        let owner = new_number();
        let path = owner_path(root, owner);
        // Under the folder's lock, or it could be taken for a dead one's before it is locked itself.
        wait_for(&*lock, due)?;
        let owner_file = (|| {
            let file = files
                .open(&path, Open::Shared)
                .map_err(system("make the owner's file"))?;
            match file.try_lock().map_err(system("lock the owner's file"))? {
                true => Ok(file),
                false => Err(Trouble::new(Fault::Locked, "the owner's file is locked")),
            }
        })();
        lock.unlock().map_err(system("unlock"))?;
        let owner_file = owner_file?;
        Ok(Self {
            lock,
            account,
            _owner_file: owner_file,
            owner,
            catalogue: None,
            closed: false,
        })
    }

    pub(super) fn catalogue(
        &mut self,
        folder: &Folder,
        generation: u64,
    ) -> Result<&dyn OpenFile, Trouble> {
        if self
            .catalogue
            .as_ref()
            .is_none_or(|(of, _)| *of != generation)
        {
            let path = folder.catalogue_path(generation);
            let file = folder.files.open(&path, Open::Shared);
            let file = file.map_err(|error| Trouble::system("open the catalogue", &error))?;
            self.catalogue = Some((generation, file));
        }
        let (_, file) = self.catalogue.as_ref().expect("opened just now");
        Ok(&**file)
    }
}

/// Room for one file; given back when dropped.
#[derive(Debug)]
pub(crate) struct Reserved<'a> {
    folder: &'a Folder,
    bytes: u64,
    clears: u64,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        // The account learns of it with its next change.
        self.folder
            .reserved
            .fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
