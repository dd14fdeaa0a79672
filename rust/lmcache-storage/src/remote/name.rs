//! The name of a chunk on a server: the same for every kind of store, and safe in a URL.
//!
//! ```text
//! <prefix>lmcache_rs.v1/<first half of the SHA-256 of the namespace, hex>/<chain hash, hex>
//! ```
//!
//! Of packed objects it is `lmcache_rs.v2`. The prefix is the operator's. The whole key is in the value's header, and is checked at each read.

use lmcache_core::hash::ChunkHash;

use super::value::Serde;
use crate::local_disk::records::{hex, namespace_digest};

/// What the names of all chunks have in common, behind the operator's prefix. It changes with the form of what
/// is stored.
pub const ROOT: &str = "lmcache_rs.v1/";
/// As [`ROOT`], of objects whose payload is packed: an engine that packs and one that does not never meet in one name.
pub const PACKED_ROOT: &str = "lmcache_rs.v2/";

/// Makes names of chunks and reads them.
#[derive(Debug, Clone)]
pub(super) struct Names {
    root: String,
}

impl Names {
    pub(super) fn new(prefix: &str, serde: Serde) -> Self {
        let root = match serde {
            Serde::Naive => ROOT,
            Serde::Lossless => PACKED_ROOT,
        };
        Self {
            root: format!("{prefix}{root}"),
        }
    }

    /// What all names begin with.
    pub(super) fn root(&self) -> &str {
        &self.root
    }

    /// What the names of a namespace's chunks begin with.
    fn folder(&self, namespace: &str) -> String {
        format!("{}{}/", self.root, digest_text(namespace))
    }

    pub(super) fn of(&self, namespace: &str, hash: ChunkHash) -> String {
        self.folder(namespace) + &hash.to_hex()
    }

    pub(super) fn of_each(&self, namespace: &str, hashes: &[ChunkHash]) -> Vec<String> {
        let folder = self.folder(namespace);
        let name = |hash: &ChunkHash| format!("{folder}{}", hash.to_hex());
        hashes.iter().map(name).collect()
    }

    /// The namespace's digest, if it is the name of a chunk.
    pub(super) fn digest_in<'a>(&self, name: &'a str) -> Option<&'a str> {
        let (digest, hash) = name.strip_prefix(&self.root)?.split_once('/')?;
        let is_hex = |text: &str, len: usize| {
            text.len() == len && text.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        (is_hex(digest, 32) && is_hex(hash, 64)).then_some(digest)
    }
}

/// What a name has of its namespace.
pub(super) fn digest_text(namespace: &str) -> String {
    hex(&namespace_digest(namespace))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_its_namespace_apart_and_is_url_safe() {
        let names = Names::new("team-a/", Serde::Naive);
        let hash = ChunkHash([0xab; 32]);
        let name = names.of("model=m@world=1", hash);
        assert_eq!(name, names.of_each("model=m@world=1", &[hash])[0]);
        assert_ne!(name, names.of("model=m@world=2", hash));
        assert!(name.starts_with("team-a/lmcache_rs.v1/"));
        let packed = Names::new("team-a/", Serde::Lossless);
        assert_ne!(name, packed.of("model=m@world=1", hash));
        assert_eq!(packed.digest_in(&name), None);
        assert!(name.ends_with(&"ab".repeat(32)));
        let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-._/".contains(&byte);
        assert!(name.bytes().all(is_safe));
        assert_eq!(
            names.digest_in(&name),
            Some(&*digest_text("model=m@world=1"))
        );
    }

    #[test]
    fn what_others_keep_is_no_name() {
        let names = Names::new("p:", Serde::Naive);
        let name = names.of("n", ChunkHash([1; 32]));
        for other in [
            &name[1..],
            &name[..name.len() - 1],
            &format!("{name}0"),
            "p:session",
            "p:lmcache_rs.v1/x/y",
            "",
        ] {
            assert_eq!(names.digest_in(other), None, "{other}");
        }
    }
}
