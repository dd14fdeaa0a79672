//! What lies under a name: an object of [`crate::object_form`], header and payload in one.

use bytes::Bytes;
use lmcache_memory::object::{ChunkMut, MemoryObj};
use tokio::task::block_in_place;

use crate::compression::{self, Sealed};
use crate::object_form::{Defect, Description, Header};

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

/// Pieces in which a payload is summed up and copied, so that each is in the processor's cache once.
const PIECE_BYTES: usize = 256 << 10;

/// Why a value gives no chunk.
#[derive(Debug)]
pub(super) enum Unusable {
    /// It is not what was put.
    Defect(Defect),
    /// There is no room for so many bytes.
    NoRoom(u64),
}

impl From<Defect> for Unusable {
    fn from(defect: Defect) -> Self {
        Self::Defect(defect)
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

/// The chunk in a value that is to be the one of `key`, verified, in memory that `room` gives.
pub(super) fn open(
    value: &[u8],
    key: &str,
    serde: Serde,
    max_payload_bytes: u64,
    room: impl FnOnce(usize) -> Option<ChunkMut>,
) -> Result<(ChunkMut, Description), Unusable> {
    if serde == Serde::Lossless {
        return block_in_place(|| open_packed(value, key, max_payload_bytes, room));
    }
    let header = Header::parse(value)?;
    header.require_key(key)?;
    let payload = &value[header.len()..];
    let due = header.description.payload_bytes;
    // Before memory is taken for what may be nonsense.
    match (payload.len() as u64).cmp(&due) {
        std::cmp::Ordering::Less => return Err(Defect::Truncated.into()),
        std::cmp::Ordering::Greater => return Err(Defect::Length.into()),
        std::cmp::Ordering::Equal => {}
    }
    let mut chunk = room(payload.len()).ok_or(Unusable::NoRoom(due))?;
    let mut check = header.check();
    let into = chunk.bytes_mut().chunks_mut(PIECE_BYTES);
    for (piece, into) in payload.chunks(PIECE_BYTES).zip(into) {
        into.copy_from_slice(piece);
        check.update(into);
    }
    check.finish()?;
    let mut description = header.description;
    if let Some(positions) = description.positions.take() {
        chunk.set_positions(positions);
    }
    Ok((chunk, description))
}

fn open_packed(
    value: &[u8],
    key: &str,
    max_payload_bytes: u64,
    room: impl FnOnce(usize) -> Option<ChunkMut>,
) -> Result<(ChunkMut, Description), Unusable> {
    let sealed = Sealed::open(value, key, max_payload_bytes)?;
    let due = sealed.description.payload_bytes;
    let mut chunk = room(due as usize).ok_or(Unusable::NoRoom(due))?;
    sealed.unpack(chunk.bytes_mut())?;
    let mut description = sealed.description;
    if let Some(positions) = description.positions.take() {
        chunk.set_positions(positions);
    }
    Ok((chunk, description))
}
