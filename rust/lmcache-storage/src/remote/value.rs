//! What is put under a name: an object of [`crate::object_form`], header and payload in one.

use bytes::Bytes;
use lmcache_memory::object::MemoryObj;
use tokio::task::block_in_place;

use crate::compression;
use crate::object_form::Description;

/// How a payload lies in its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Serde {
    /// As it is in memory.
    #[default]
    Naive,
    /// Packed; see [`crate::compression`].
    Lossless,
}

impl Serde {
    const ALL: [(Self, &'static str); 2] = [(Self::Naive, "naive"), (Self::Lossless, "lossless")];

    /// The one of that name in settings.
    pub fn from_name(name: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|each| each.1 == name).map(|each| each.0)
    }
}

/// The memory of an object, held as long as it is sent.
struct Held(MemoryObj);

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

/// The value of a chunk, in pieces; `None` if its description says more than a header holds.
pub(super) fn seal(
    description: &Description,
    object: MemoryObj,
    serde: Serde,
) -> Option<Vec<Bytes>> {
    match serde {
        Serde::Naive => {
            let header = description.seal(object.bytes())?;
            Some(vec![Bytes::from(header), Bytes::from_owner(Held(object))])
        }
        Serde::Lossless => {
            // As long as a large copy and more: others go on meanwhile.
            let packed = block_in_place(|| compression::seal(description, object.bytes()))?;
            Some(vec![packed.into()])
        }
    }
}
