//! A walk through a folder: what is in it, whatever account and catalogue say.

use std::time::SystemTime;

use super::faults::Trouble;
use super::folder::{Folder, NUM_SHARDS};
use super::held::shard_of;
use super::records::{Event, Name, Record, charge};
use crate::object_form::{Defect, PAGE_BYTES};

/// A chunk's file.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) name: Name,
    pub(crate) bytes: u64,
    modified: SystemTime,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Walk {
    /// Oldest first.
    pub(crate) chunks: Vec<Found>,
    /// Charges of files that are none of ours; they are left alone.
    strange: u64,
    pub(crate) last_catalogue: u64,
}

impl Walk {
    /// Walks. What carries a chunk's name and cannot be one, for its size, is removed.
    pub(crate) fn of(folder: &Folder) -> Result<Self, Trouble> {
        let mut walk = Self {
            chunks: Vec::new(),
            strange: 0,
            last_catalogue: 0,
        };
        for shard in 0..NUM_SHARDS {
            let path = folder.root.join(format!("{shard:02x}"));
            let listed = match folder.files.list(&path) {
                Ok(listed) => listed,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    folder.note_lost();
                    continue;
                }
                Err(error) => return Err(Trouble::system("list a folder", &error)),
            };
            for file in listed {
                match Name::parse(&file.name).filter(|name| shard_of(name) == shard) {
                    None => walk.strange += charge(file.bytes),
                    Some(_) if file.bytes == 0 || file.bytes % PAGE_BYTES as u64 != 0 => {
                        let found = format!("{} with {} bytes", file.name, file.bytes);
                        folder
                            .faults
                            .note("walk", &Trouble::new(Defect::Truncated, found));
                        if folder.files.remove(&path.join(&file.name)).is_err() {
                            walk.strange += charge(file.bytes);
                        }
                    }
                    Some(name) => walk.chunks.push(Found {
                        name,
                        bytes: file.bytes,
                        modified: file.modified,
                    }),
                }
            }
        }
        let listed = folder.files.list(&folder.root);
        for file in listed.map_err(|error| Trouble::system("list the folder", &error))? {
            if let Some(number) = file.name.strip_prefix("catalogue-") {
                let number = u64::from_str_radix(number, 16).unwrap_or(0);
                walk.last_catalogue = walk.last_catalogue.max(number);
                // Another is written in its place.
                let _ = folder.files.remove(&folder.root.join(&file.name));
            }
        }
        walk.chunks.sort_by_key(|found| found.modified);
        Ok(walk)
    }

    pub(crate) fn charges(&self) -> u64 {
        self.strange
            + self
                .chunks
                .iter()
                .map(|found| charge(found.bytes))
                .sum::<u64>()
    }

    /// A catalogue of what is there.
    pub(crate) fn records(&self) -> Vec<Record> {
        let record = |(batch, found): (usize, &Found)| Record {
            event: Event::Put,
            name: found.name,
            bytes: found.bytes,
            batch: batch as u32,
            position: 0,
        };
        self.chunks.iter().enumerate().map(record).collect()
    }

    /// Removes the chunks and the folders they were in.
    pub(crate) fn remove_all(self, folder: &Folder) {
        for found in self.chunks {
            let _ = folder.files.remove(&folder.path_of(&found.name));
        }
        for shard in 0..NUM_SHARDS {
            let _ = folder
                .files
                .remove_folder(&folder.root.join(format!("{shard:02x}")));
        }
    }
}
