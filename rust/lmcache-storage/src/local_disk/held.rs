//! A folder while its lock is held: steps announced, made and accounted for; those of the dead ended.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::faults::{Fault, Trouble};
use super::files::{Open, OpenFile, read_fully, write_fully};
use super::folder::{Door, Folder, NUM_SHARDS};
use super::records::{
    Account, Event, Intent, MAX_SHARES, Name, RECORD_BYTES, Record, Share, charge,
};
use super::walk::Walk;
use crate::object_form::PAGE_BYTES;

/// The folder's lock, and its account as it is now.
pub(crate) struct Held<'a> {
    pub(super) folder: &'a Folder,
    pub(super) door: MutexGuard<'a, Door>,
    pub(crate) account: Account,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.door.lock.unlock() {
            self.folder
                .faults
                .note("unlock", &Trouble::system("unlock", &error));
        }
    }
}

impl Held<'_> {
    /// Account, catalogue and index as they should be, whatever happened to their last user.
    pub(super) fn catch_up(&mut self) -> Result<(), Trouble> {
        let folder = self.folder;
        let boot = folder.files.boot();
        let read = read_account(&*self.door.account);
        let read = read.map_err(|error| Trouble::system("read the account", &error))?;
        let Some(account) = read.filter(|account| boot != 0 && account.boot == boot) else {
            return self.rebuild();
        };
        self.account = account;
        if self.follow_catalogue().is_err() {
            return self.rebuild();
        }
        match self.account.intent {
            Intent::None => {}
            Intent::One(record) => {
                self.end_step(record)?;
                self.bury_dead()?;
            }
            Intent::Many => self.rebuild()?,
        }
        folder.used.store(self.account.used, Ordering::Relaxed);
        let owner = self.door.owner;
        if self.account.share(owner).is_none() {
            self.write_account()?;
        }
        // A quarter more than there is, so that a restart reads little else.
        let stored = folder.index.lock().len() as u64;
        if self.account.num_records > stored + stored / 4 + folder.max_dead_records() {
            self.compact()?;
        }
        Ok(())
    }

    fn follow_catalogue(&mut self) -> Result<(), Trouble> {
        let folder = self.folder;
        let (generation, to) = (self.account.generation, self.account.num_records);
        let mut index = folder.index.lock();
        if index.generation == generation && index.num_records == to {
            return Ok(());
        }
        let fresh = index.generation != generation || index.num_records > to;
        let from = if fresh { 0 } else { index.num_records };
        drop(index);
        // Only whoever has the door changes the index's place in the catalogue.
        let records = folder.read_records(&mut self.door, generation, from, to)?;
        index = folder.index.lock();
        if fresh {
            index.reload(folder.policy, generation, &records);
        } else {
            records.iter().for_each(|record| index.apply(record));
        }
        Ok(())
    }

    /// Ends a step that somebody began: done if its file says so, undone otherwise.
    fn end_step(&mut self, record: Record) -> Result<(), Trouble> {
        let folder = self.folder;
        let path = folder.path_of(&record.name);
        match record.event {
            Event::Removed => self.remove(record.name, record.bytes),
            Event::Put => {
                let opened = folder.files.open(&path, Open::Read { direct: false });
                match opened.and_then(|file| file.bytes()) {
                    Ok(bytes) if bytes == record.bytes => self.finish(record),
                    Err(error) if error.kind() == ErrorKind::NotFound => self.begin(Intent::None),
                    Err(error) => Err(Trouble::system("look for a chunk", &error)),
                    Ok(_) => {
                        let removed = folder.files.remove(&path);
                        removed.map_err(|error| Trouble::system("remove", &error))?;
                        self.begin(Intent::None)
                    }
                }
            }
        }
    }

    /// Removes a chunk of the index: file, record, account.
    pub(super) fn remove(&mut self, name: Name, bytes: u64) -> Result<(), Trouble> {
        let record = Record {
            event: Event::Removed,
            name,
            bytes,
            batch: 0,
            position: 0,
        };
        self.begin(Intent::One(record))?;
        match self.folder.files.remove(&self.folder.path_of(&name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                self.begin(Intent::None)?;
                Err(Trouble::system("remove", &error))
            }
            _ => self.finish(record),
        }
    }

    /// Announces a step.
    pub(super) fn begin(&mut self, intent: Intent) -> Result<(), Trouble> {
        self.account.intent = intent;
        self.write_account()
    }

    /// Notes a step that is done to its file.
    pub(super) fn finish(&mut self, record: Record) -> Result<(), Trouble> {
        let (generation, at) = (self.account.generation, self.account.num_records);
        let folder = self.folder;
        let file = self.door.catalogue(folder, generation)?;
        write_fully(file, &record.to_bytes(), at * RECORD_BYTES as u64)
            .map_err(|error| Trouble::system("write the catalogue", &error))?;
        self.account.num_records += 1;
        let bytes = charge(record.bytes);
        self.account.used = match record.event {
            Event::Put => self.account.used + bytes,
            Event::Removed => self.account.used.saturating_sub(bytes),
        };
        self.account.intent = Intent::None;
        // Before the account: should that fail, the index is ahead of it and loaded anew.
        folder.index.lock().apply(&record);
        self.write_account()
    }

    /// Appends records of what was used, which change nothing that is there.
    pub(super) fn tell(&mut self, records: &[Record]) -> Result<(), Trouble> {
        let (generation, at) = (self.account.generation, self.account.num_records);
        let folder = self.folder;
        let file = self.door.catalogue(folder, generation)?;
        write_fully(file, &bytes_of(records), at * RECORD_BYTES as u64)
            .map_err(|error| Trouble::system("write the catalogue", &error))?;
        self.account.num_records += records.len() as u64;
        let mut index = folder.index.lock();
        records.iter().for_each(|record| index.apply(record));
        drop(index);
        self.write_account()
    }

    /// Writes the account, with what this process has reserved.
    pub(crate) fn write_account(&mut self) -> Result<(), Trouble> {
        let (owner, reserved) = (
            self.door.owner,
            self.folder.reserved.load(Ordering::Relaxed),
        );
        if let Some(share) = self.account.share(owner) {
            share.reserved = reserved;
        } else if self.account.shares.len() < MAX_SHARES {
            self.account.shares.push(Share { owner, reserved });
        } else {
            return Err(Trouble::new(
                Fault::Full,
                format!("{MAX_SHARES} processes use this folder; give some another"),
            ));
        }
        self.write_page()
    }

    pub(super) fn write_page(&self) -> Result<(), Trouble> {
        self.folder.used.store(self.account.used, Ordering::Relaxed);
        write_fully(&*self.door.account, &self.account.to_page(), 0)
            .map_err(|error| Trouble::system("write the account", &error))
    }

    /// Takes back what dead processes had reserved, and removes what they were writing.
    pub(super) fn bury_dead(&mut self) -> Result<(), Trouble> {
        let (folder, own) = (self.folder, self.door.owner);
        let shares = &mut self.account.shares;
        let before = shares.len();
        shares.retain(|share| share.owner == own || is_alive(folder, share.owner));
        let changed = shares.len() != before;
        let mut living: Vec<u64> = shares.iter().map(|share| share.owner).collect();
        // Those that are in no account yet, or died before they were.
        let listed = folder.files.list(&folder.root.join("owners"));
        for file in listed.map_err(|error| Trouble::system("list the owners", &error))? {
            if let Ok(owner) = u64::from_str_radix(&file.name, 16)
                && owner != own
                && !living.contains(&owner)
                && is_alive(folder, owner)
            {
                living.push(owner);
            }
        }
        remove_temps(folder, |owner| owner != own && !living.contains(&owner));
        if changed {
            self.write_account()
        } else {
            Ok(())
        }
    }

    /// Walks the folder, and writes account and catalogue anew.
    fn rebuild(&mut self) -> Result<(), Trouble> {
        let walk = Walk::of(self.folder)?;
        self.install(walk)
    }

    /// Writes account and catalogue as a walk found the folder.
    pub(super) fn install(&mut self, walk: Walk) -> Result<(), Trouble> {
        let folder = self.folder;
        let listed = folder.files.list(&folder.root.join("owners"));
        for file in listed.map_err(|error| Trouble::system("list the owners", &error))? {
            let Ok(owner) = u64::from_str_radix(&file.name, 16) else {
                continue;
            };
            let known = self.account.share(owner).is_some();
            if owner != self.door.owner
                && is_alive(folder, owner)
                && !known
                && self.account.shares.len() < MAX_SHARES
            {
                self.account.shares.push(Share { owner, reserved: 0 });
            }
        }
        self.account.used = walk.charges();
        let boot = folder.files.boot();
        self.account.boot = boot;
        let generation = walk.last_catalogue.max(self.account.generation) + 1;
        self.write_catalogue(generation, &walk.records())?;
        self.bury_dead()
    }

    /// Writes the catalogue anew without what is gone.
    fn compact(&mut self) -> Result<(), Trouble> {
        let folder = self.folder;
        let (generation, to) = (self.account.generation, self.account.num_records);
        let records = folder.read_records(&mut self.door, generation, 0, to)?;
        let mut seen = std::collections::HashSet::new();
        let last = records
            .iter()
            .rev()
            .filter(|record| seen.insert(record.name));
        let mut kept: Vec<Record> = last
            .filter(|record| record.event == Event::Put)
            .copied()
            .collect();
        kept.reverse();
        self.write_catalogue(generation + 1, &kept)
    }

    fn write_catalogue(&mut self, generation: u64, records: &[Record]) -> Result<(), Trouble> {
        let folder = self.folder;
        let system = |error: io::Error| Trouble::system("write a catalogue", &error);
        let path = folder.catalogue_path(generation);
        let _ = folder.files.remove(&path);
        let file = folder
            .files
            .open(&path, Open::New { direct: false })
            .map_err(system)?;
        write_fully(&*file, &bytes_of(records), 0).map_err(system)?;
        let old = std::mem::replace(&mut self.account.generation, generation);
        self.account.num_records = records.len() as u64;
        self.account.intent = Intent::None;
        self.door.catalogue = None;
        self.write_account()?;
        folder
            .index
            .lock()
            .reload(folder.policy, generation, records);
        if old != generation {
            let _ = folder.files.remove(&folder.catalogue_path(old));
        }
        Ok(())
    }
}

fn bytes_of(records: &[Record]) -> Vec<u8> {
    records
        .iter()
        .flat_map(|record| record.to_bytes())
        .collect()
}

/// Waits for the folder's lock, which other processes hold for moments.
pub(super) fn wait_for(lock: &dyn OpenFile, due: Instant) -> Result<(), Trouble> {
    let mut pause = Duration::from_micros(50);
    while !lock
        .try_lock()
        .map_err(|error| Trouble::system("lock", &error))?
    {
        if Instant::now() + pause > due {
            let found = "another process does not give the folder's lock back";
            return Err(Trouble::new(Fault::Locked, found));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(2));
    }
    Ok(())
}

pub(crate) fn shard_of(name: &Name) -> u8 {
    name.hash.0[0] % NUM_SHARDS
}

pub(super) fn owner_path(root: &Path, owner: u64) -> PathBuf {
    root.join("owners").join(format!("{owner:016x}"))
}

/// A number that nobody else has.
pub(crate) fn new_number() -> u64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one((std::process::id(), std::time::SystemTime::now()))
}

/// Whether the process lives; the file of one that does not is removed.
pub(super) fn is_alive(folder: &Folder, owner: u64) -> bool {
    let path = owner_path(&folder.root, owner);
    match folder.files.open(&path, Open::Read { direct: false }) {
        Ok(file) => match file.try_lock() {
            Ok(true) => {
                let _ = folder.files.remove(&path);
                false
            }
            _ => true,
        },
        Err(error) => error.kind() != ErrorKind::NotFound,
    }
}

pub(super) fn remove_temps(folder: &Folder, of: impl Fn(u64) -> bool) {
    let temps = folder.root.join("tmp");
    for file in folder.files.list(&temps).unwrap_or_default() {
        let owner = file
            .name
            .split_once('-')
            .and_then(|(owner, _)| u64::from_str_radix(owner, 16).ok());
        if owner.is_none_or(&of) {
            let _ = folder.files.remove(&temps.join(&file.name));
        }
    }
}

pub(super) fn read_account(file: &dyn OpenFile) -> io::Result<Option<Account>> {
    let mut page = vec![0; PAGE_BYTES];
    let count = read_fully(file, &mut page, 0)?;
    Ok(Account::read(&page[..count]))
}
