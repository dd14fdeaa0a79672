//! One process at a time serves at a path, and nobody but its user reaches it.
//!
//! A lock beside the socket says whether the server lives: it ends with the process, however that ends, so
//! a socket file found under a free lock is a dead one's and is replaced. The lock also keeps two servers
//! that start at once from removing each other's socket.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::LookupServerError;

/// `sun_path` has 108 bytes, the last of which is 0.
const MAX_PATH_BYTES: usize = 107;

/// Stands behind the socket's name in that of its lock.
const LOCK_SUFFIX: &str = ".lock";
/// Longer than a sweep holds one lock.
const SWEEP_MOMENT: Duration = Duration::from_millis(50);

/// A bound socket file; removed when dropped.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    socket_inode: Inode,
    lock_path: PathBuf,
    lock: File,
}

type Inode = (u64, u64);

fn inode(metadata: &fs::Metadata) -> Inode {
    (metadata.dev(), metadata.ino())
}

impl SocketFile {
    /// Makes the folder (mode 0700) if need be and listens at `path` (mode 0600).
    pub(crate) fn bind(path: &Path) -> Result<(Self, UnixListener), LookupServerError> {
        let found = path.as_os_str().as_bytes().len();
        if found > MAX_PATH_BYTES {
            let limit = MAX_PATH_BYTES;
            return Err(LookupServerError::PathTooLong {
                path: path.into(),
                found,
                limit,
            });
        }
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let folder_uid = private_folder(folder)?;
        let mut lock_path = path.as_os_str().to_owned();
        lock_path.push(LOCK_SUFFIX);
        let lock_path = PathBuf::from(lock_path);
        let lock = lock(path, &lock_path)?;
        // From here on, dropping the file removes the lock again.
        let mut file = Self {
            path: path.into(),
            socket_inode: (0, 0),
            lock_path,
            lock,
        };
        // Only root gets this far in the folder of another user.
        if file.uid()? != folder_uid {
            let found = format!("belongs to uid {folder_uid}");
            return Err(LookupServerError::FolderNotPrivate {
                folder: folder.into(),
                found,
            });
        }
        remove_stale(path)?;
        sweep(folder);
        let listener =
            UnixListener::bind(path).map_err(|source| system("listen at", path, source))?;
        let metadata = fs::symlink_metadata(path).map_err(|e| system("examine", path, e))?;
        file.socket_inode = inode(&metadata);
        let private = Permissions::from_mode(0o600);
        fs::set_permissions(path, private).map_err(|e| system("set the mode of", path, e))?;
        Ok((file, listener))
    }

    /// The user this process makes files as.
    pub(crate) fn uid(&self) -> Result<u32, LookupServerError> {
        let metadata = self.lock.metadata();
        metadata
            .map(|lock| lock.uid())
            .map_err(|source| system("examine", &self.lock_path, source))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Somebody may have emptied the folder, and another server may be there by now.
        for (path, own) in [
            (&self.path, Some(self.socket_inode)),
            (&self.lock_path, self.lock_inode()),
        ] {
            if fs::symlink_metadata(path).is_ok_and(|found| Some(inode(&found)) == own) {
                let _ = fs::remove_file(path);
            }
        }
    }
}

impl SocketFile {
    fn lock_inode(&self) -> Option<Inode> {
        self.lock.metadata().ok().as_ref().map(inode)
    }
}

fn system(what: &'static str, path: &Path, source: io::Error) -> LookupServerError {
    LookupServerError::System {
        what,
        path: path.into(),
        source,
    }
}

/// The owner of the folder, which is made if it is not there, and refused if others can enter it.
fn private_folder(folder: &Path) -> Result<u32, LookupServerError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|source| system("make the folder", folder, source))?;
    // `.` and paths through links are followed up to the folder itself, which may not be one.
    let metadata = fs::symlink_metadata(folder).map_err(|e| system("examine", folder, e))?;
    let mode = metadata.mode() & 0o7777;
    let found = if !metadata.is_dir() {
        "is a link or a file".into()
    } else if mode & 0o077 != 0 {
        format!("has mode {mode:04o}")
    } else {
        return Ok(metadata.uid());
    };
    Err(LookupServerError::FolderNotPrivate {
        folder: folder.into(),
        found,
    })
}

fn lock(path: &Path, lock_path: &Path) -> Result<File, LookupServerError> {
    let deadline = Instant::now() + SWEEP_MOMENT;
    loop {
        let mut options = OpenOptions::new();
        let file = options
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(lock_path);
        let file = file.map_err(|source| system("open", lock_path, source))?;
        match file.try_lock() {
            Ok(()) => {}
            // Whoever sweeps the folder holds a free lock for a moment; a server holds it for good.
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                thread::sleep(SWEEP_MOMENT / 10);
                continue;
            }
            Err(TryLockError::WouldBlock) => {
                return Err(LookupServerError::InUse { path: path.into() });
            }
            Err(TryLockError::Error(source)) => return Err(system("lock", lock_path, source)),
        }
        // A server that ended between our open and our lock has removed the file we locked.
        let locked = file
            .metadata()
            .map_err(|source| system("examine", lock_path, source))?;
        if fs::symlink_metadata(lock_path).is_ok_and(|found| inode(&found) == inode(&locked)) {
            return Ok(file);
        }
    }
}

/// Removes what killed servers have left in the folder. Engines have names of their own, so nobody else
/// would come back for these files; what cannot be removed stays.
fn sweep(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let lock_path = entry.path();
        let Some(socket_path) = lock_path
            .to_str()
            .and_then(|text| text.strip_suffix(LOCK_SUFFIX))
        else {
            continue;
        };
        let socket_path = Path::new(socket_path);
        let Ok(lock) = File::options().write(true).open(&lock_path) else {
            continue;
        };
        if socket_path
            .extension()
            .is_some_and(|ending| ending == "sock")
            && lock.try_lock().is_ok()
            && remove_stale(socket_path).is_ok()
        {
            let _ = fs::remove_file(&lock_path);
        }
    }
}

fn remove_stale(path: &Path) -> Result<(), LookupServerError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(system("examine", path, source)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(LookupServerError::NotASocket { path: path.into() });
        }
        Ok(_) => {}
    }
    // Whoever accepts here does not know our lock, but is alive.
    if UnixStream::connect(path).is_ok() {
        return Err(LookupServerError::InUse { path: path.into() });
    }
    fs::remove_file(path).map_err(|source| system("remove the stale socket", path, source))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it is there").mode() & 0o7777
    }

    fn private_tempdir() -> tempfile::TempDir {
        let private = Permissions::from_mode(0o700);
        let folder = tempfile::Builder::new().permissions(private).tempdir();
        folder.expect("a folder")
    }

    #[test]
    fn what_killed_servers_left_is_swept_and_what_lives_is_not() {
        let folder = private_tempdir();
        let at = |name: &str| folder.path().join(name);
        let (alive, _serving) = SocketFile::bind(&at("alive.sock")).expect("a fresh path");
        // A killed server's socket and lock: nobody listens, nobody holds the lock.
        drop(UnixListener::bind(at("dead.sock")).expect("a fresh path"));
        for name in ["dead.sock.lock", "half.sock.lock", "notes.lock"] {
            File::create(at(name)).expect("a file");
        }
        let (_own, _listener) = SocketFile::bind(&at("own.sock")).expect("a fresh path");
        for (name, there) in [
            ("dead.sock", false),
            ("dead.sock.lock", false),
            ("half.sock.lock", false),
            ("notes.lock", true),
            ("alive.sock", true),
            ("alive.sock.lock", true),
            ("own.sock", true),
        ] {
            assert_eq!(fs::symlink_metadata(at(name)).is_ok(), there, "{name}");
        }
        drop(alive);
    }

    #[test]
    fn folder_and_socket_are_closed_to_others() {
        let folder = private_tempdir();
        let path = folder.path().join("a/b/s");
        let (file, _listener) = SocketFile::bind(&path).expect("a fresh path");
        assert_eq!(mode(&folder.path().join("a")), 0o700);
        assert_eq!(mode(&folder.path().join("a/b")), 0o700);
        assert_eq!(mode(&path), 0o600);
        assert_eq!(mode(&file.lock_path), 0o600);
    }

    #[test]
    fn dropping_the_file_leaves_an_empty_folder() {
        let folder = private_tempdir();
        drop(SocketFile::bind(&folder.path().join("s")).expect("a fresh path"));
        assert_eq!(fs::read_dir(folder.path()).expect("it is there").count(), 0);
    }

    #[test]
    fn a_folder_that_others_can_enter_is_refused() {
        let folder = private_tempdir();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o750)).expect("it is ours");
        let refused = SocketFile::bind(&folder.path().join("s")).expect_err("0750");
        assert!(
            matches!(&refused, LookupServerError::FolderNotPrivate { .. }),
            "{refused}"
        );
        assert!(refused.to_string().contains("has mode 0750"), "{refused}");
    }

    #[test]
    fn a_linked_folder_is_refused() {
        let folder = private_tempdir();
        let link = folder.path().join("link");
        symlink(folder.path(), &link).expect("a link");
        let refused = SocketFile::bind(&link.join("s")).expect_err("a link");
        assert!(refused.to_string().contains("is a link"), "{refused}");
    }

    #[test]
    fn a_live_server_is_not_displaced() {
        let folder = private_tempdir();
        let path = folder.path().join("s");
        let (_first, _listener) = SocketFile::bind(&path).expect("a fresh path");
        let refused = SocketFile::bind(&path).expect_err("it is in use");
        assert!(matches!(refused, LookupServerError::InUse { .. }));
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn a_server_that_is_about_to_listen_is_not_overtaken() {
        let folder = private_tempdir();
        let starting = File::create(folder.path().join("s.lock")).expect("a lock");
        starting.lock().expect("nobody holds it");
        let refused = SocketFile::bind(&folder.path().join("s")).expect_err("it is locked");
        assert!(matches!(refused, LookupServerError::InUse { .. }));
    }

    #[test]
    fn a_live_socket_of_something_else_is_not_displaced() {
        let folder = private_tempdir();
        let path = folder.path().join("s");
        let _listener = UnixListener::bind(&path).expect("a fresh path");
        let refused = SocketFile::bind(&path).expect_err("it is in use");
        assert!(matches!(refused, LookupServerError::InUse { .. }));
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn a_dead_servers_socket_is_replaced() {
        let folder = private_tempdir();
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).expect("a fresh path"));
        File::create(folder.path().join("s.lock")).expect("a dead server's lock");
        assert!(UnixStream::connect(&path).is_err());
        let (_file, _listener) = SocketFile::bind(&path).expect("a stale path");
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let folder = private_tempdir();
        let path = folder.path().join("s");
        fs::write(&path, "precious").expect("a file");
        let refused = SocketFile::bind(&path).expect_err("a file is in the way");
        assert!(matches!(refused, LookupServerError::NotASocket { .. }));
        assert_eq!(fs::read(&path).expect("still there"), b"precious");
        assert!(!folder.path().join("s.lock").exists());
    }

    #[test]
    fn a_path_too_long_for_a_socket_is_refused_with_both_lengths() {
        let folder = private_tempdir();
        let path = folder.path().join("x".repeat(200));
        let refused = SocketFile::bind(&path)
            .expect_err("it is too long")
            .to_string();
        assert!(refused.contains("at most 107"), "{refused}");
    }

    #[test]
    fn a_successors_files_are_left_to_it() {
        let folder = private_tempdir();
        let path = folder.path().join("s");
        let first = SocketFile::bind(&path).expect("a fresh path");
        fs::remove_file(&path).expect("it is there");
        fs::remove_file(folder.path().join("s.lock")).expect("it is there");
        let _second = SocketFile::bind(&path).expect("an emptied folder");
        drop(first);
        assert!(UnixStream::connect(&path).is_ok());
    }
}
