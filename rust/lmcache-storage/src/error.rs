//! Errors of this crate: what was asked, what was found, what to change.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why no lookup server could be started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LookupServerError {
    /// Another server answers there.
    #[error("another lookup server is live at {}; give each engine and rank a path of its own", path.display())]
    InUse {
        /// The socket asked for.
        path: PathBuf,
    },
    /// Something that is no socket is in the way, and is left alone.
    #[error("{} exists and is not a socket; move it away or choose another path", path.display())]
    NotASocket {
        /// The socket asked for.
        path: PathBuf,
    },
    /// Unix sockets have short names.
    #[error("socket path {} has {found} bytes, at most {limit} are possible; choose a shorter folder", path.display())]
    PathTooLong {
        /// The socket asked for.
        path: PathBuf,
        /// Its length in bytes.
        found: usize,
        /// The longest that is possible.
        limit: usize,
    },
    /// Others could reach or replace a socket in that folder.
    #[error("socket folder {} {found}; it must be a folder of this user's own with mode 0700", folder.display())]
    FolderNotPrivate {
        /// The folder asked for.
        folder: PathBuf,
        /// What is wrong with it.
        found: String,
    },
    /// The system refused.
    #[error("cannot {what} {}: {source}", path.display())]
    System {
        /// What was tried.
        what: &'static str,
        /// The file it was tried on.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}
