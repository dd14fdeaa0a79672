//! Every operation on files, behind one trait: where the tests put faults, and kill and cut the power.

use std::fmt;
use std::fs;
use std::io::{self, ErrorKind, IoSliceMut};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::SystemTime;

/// How a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Open {
    /// To read what is there.
    Read {
        /// Past the page cache.
        direct: bool,
    },
    /// A new file of this user's own; one of that name is an error.
    New {
        /// Past the page cache.
        direct: bool,
    },
    /// To read and write; made if it is not there, kept as it is if it is.
    Shared,
}

/// A file as a listing shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name in the folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// When it was last written.
    pub modified: SystemTime,
}

/// An open file. Reads and writes may be short, as the system's are.
pub trait OpenFile: fmt::Debug + Send + Sync {
    /// Reads at an offset; how many bytes.
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<usize>;
    /// As [`OpenFile::read_at`], into two pieces of memory as if they were one; by one call, where the system can.
    fn read_two_at(&self, first: &mut [u8], second: &mut [u8], at: u64) -> io::Result<usize> {
        let count = self.read_at(first, at)?;
        if count < first.len() {
            return Ok(count);
        }
        Ok(count + self.read_at(second, at + count as u64)?)
    }
    /// Writes at an offset; how many bytes.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize>;
    /// Its size in bytes.
    fn bytes(&self) -> io::Result<u64>;
    /// Waits until its bytes are on the device.
    fn sync(&self) -> io::Result<()>;
    /// Takes the lock that only one open file of this name has at a time; whether it is ours.
    fn try_lock(&self) -> io::Result<bool>;
    /// Gives the lock back.
    fn unlock(&self) -> io::Result<()>;
}

/// The file system.
pub trait Files: fmt::Debug + Send + Sync {
    /// Opens a file.
    fn open(&self, path: &Path, how: Open) -> io::Result<Box<dyn OpenFile>>;
    /// Gives a file another name, in one step.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Makes a folder of mode 0700, and those above it; one that is there is kept.
    fn make_folder(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty folder.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
    /// The plain files of a folder.
    fn list(&self, folder: &Path) -> io::Result<Vec<Listed>>;
    /// Names the time since the machine was started: after another start, what was written before may be
    /// there in part. 0 if the system does not say.
    fn boot(&self) -> u64;
}

/// The system's own.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemFiles;

impl OpenFile for fs::File {
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        FileExt::read_at(self, into, at)
    }

    fn read_two_at(&self, first: &mut [u8], second: &mut [u8], at: u64) -> io::Result<usize> {
        let mut both = [IoSliceMut::new(first), IoSliceMut::new(second)];
        Ok(rustix::io::preadv(self, &mut both, at)?)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        FileExt::write_at(self, bytes, at)
    }

    fn bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn try_lock(&self) -> io::Result<bool> {
        match fs::File::try_lock(self) {
            Ok(()) => Ok(true),
            Err(fs::TryLockError::WouldBlock) => Ok(false),
            Err(fs::TryLockError::Error(error)) => Err(error),
        }
    }

    fn unlock(&self) -> io::Result<()> {
        fs::File::unlock(self)
    }
}

impl Files for SystemFiles {
    fn open(&self, path: &Path, how: Open) -> io::Result<Box<dyn OpenFile>> {
        let mut options = fs::OpenOptions::new();
        let mut flags = libc::O_NOFOLLOW;
        match how {
            Open::Read { direct } => {
                options.read(true);
                flags |= if direct { libc::O_DIRECT } else { 0 };
            }
            Open::New { direct } => {
                options.write(true).create_new(true);
                flags |= if direct { libc::O_DIRECT } else { 0 };
            }
            Open::Shared => {
                options.read(true).write(true).create(true);
            }
        }
        let file = options.mode(0o600).custom_flags(flags).open(path)?;
        Ok(Box::new(file))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<Listed>> {
        let mut listed = Vec::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let about = match entry.metadata() {
                Ok(about) => about,
                // Gone since its name was read.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            if about.is_file() {
                listed.push(Listed {
                    name: entry.file_name().to_string_lossy().into_owned(),
                    bytes: about.len(),
                    modified: about.modified().unwrap_or(SystemTime::UNIX_EPOCH),
                });
            }
        }
        Ok(listed)
    }

    fn boot(&self) -> u64 {
        let id = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        if id.is_empty() {
            0
        } else {
            crate::object_form::crc64(&id).max(1)
        }
    }
}

/// Reads until `into` is full or the file ends; how many bytes.
pub(crate) fn read_fully(file: &dyn OpenFile, into: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < into.len() {
        match file.read_at(&mut into[done..], at + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// As [`read_fully`], into two pieces of memory as if they were one.
pub(crate) fn read_two_fully(
    file: &dyn OpenFile,
    first: &mut [u8],
    second: &mut [u8],
    at: u64,
) -> io::Result<usize> {
    let done = match file.read_two_at(first, second, at) {
        Err(error) if error.kind() == ErrorKind::Interrupted => 0,
        outcome => outcome?,
    };
    let (in_first, mut count) = (done.min(first.len()), done);
    if in_first < first.len() {
        count += read_fully(file, &mut first[in_first..], at + done as u64)?;
    }
    if count >= first.len() {
        let in_second = count - first.len();
        count += read_fully(file, &mut second[in_second..], at + count as u64)?;
    }
    Ok(count)
}

/// Writes all of `bytes`.
pub(crate) fn write_fully(file: &dyn OpenFile, bytes: &[u8], at: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match file.write_at(&bytes[done..], at + done as u64) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => done += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
