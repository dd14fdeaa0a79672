//! One chunk's file: the object, and zeros up to a whole page.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::atomic::Ordering;

use lmcache_memory::object::ChunkMut;

use super::faults::Trouble;
use super::files::{Open, OpenFile, read_fully, read_two_fully, write_fully};
use super::folder::Folder;
use super::records::Name;
use crate::object_form::{Check, Defect, Description, Header, PAGE_BYTES};

/// Objects up to this size are read with one call and copied from there.
const SMALL_BYTES: u64 = 128 << 10;
/// Pieces in which a payload is read: many requests of the device's each, and not so many that the sum of the last
/// one is long waited for.
const PIECE_BYTES: usize = 8 << 20;
/// Pieces in which it is copied where its memory is not aligned.
const BOUNCE_BYTES: usize = 2 << 20;

/// Memory at a page's boundary, as direct I/O needs it.
pub(crate) struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    pub(crate) fn new(len: usize) -> Self {
        let bytes = vec![0; len + PAGE_BYTES];
        let start = bytes.as_ptr().align_offset(PAGE_BYTES);
        Self { bytes, start, len }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..][..self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.len]
    }
}

fn is_aligned(bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(PAGE_BYTES)
}

/// Size of the file of an object.
pub(crate) fn file_bytes(header_bytes: usize, payload_bytes: usize) -> u64 {
    (header_bytes + payload_bytes).next_multiple_of(PAGE_BYTES) as u64
}

/// Writes an object into a new file. What it leaves behind when it fails, the caller removes.
pub(crate) fn write(
    folder: &Folder,
    path: &Path,
    header: &[u8],
    payload: &[u8],
    sync: bool,
) -> Result<(), Trouble> {
    let attempt = |direct: bool| -> io::Result<()> {
        let file = folder.files.open(path, Open::New { direct })?;
        write_object(&*file, header, payload)?;
        if sync { file.sync() } else { Ok(()) }
    };
    let direct = folder.direct.load(Ordering::Relaxed);
    let outcome = match attempt(direct) {
        Err(error) if direct && refuses_direct(&error) => {
            folder.direct.store(false, Ordering::Relaxed);
            tracing::warn!(
                "direct I/O is refused ({error}); files go through the page cache from now on"
            );
            let _ = folder.files.remove(path);
            attempt(false)
        }
        outcome => outcome,
    };
    outcome.map_err(|error| {
        if error.kind() == ErrorKind::NotFound {
            folder.note_lost();
        }
        Trouble::system("write a chunk", &error)
    })
}

fn refuses_direct(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::InvalidInput | ErrorKind::Unsupported
    ) || error.raw_os_error() == Some(libc::EINVAL)
}

fn write_object(file: &dyn OpenFile, header: &[u8], payload: &[u8]) -> io::Result<()> {
    let whole = payload.len() - payload.len() % PAGE_BYTES;
    let (pages, tail) = payload.split_at(whole);
    let at = header.len() as u64;
    if header.len() + payload.len() <= SMALL_BYTES as usize {
        let mut all = Aligned::new(file_bytes(header.len(), payload.len()) as usize);
        all.bytes_mut()[..header.len()].copy_from_slice(header);
        all.bytes_mut()[header.len()..][..payload.len()].copy_from_slice(payload);
        return write_fully(file, all.bytes(), 0);
    }
    let mut first = Aligned::new(header.len());
    first.bytes_mut().copy_from_slice(header);
    write_fully(file, first.bytes(), 0)?;
    if is_aligned(pages) {
        write_fully(file, pages, at)?;
    } else {
        let mut bounce = Aligned::new(BOUNCE_BYTES.min(pages.len()));
        for (i, piece) in pages.chunks(BOUNCE_BYTES).enumerate() {
            bounce.bytes_mut()[..piece.len()].copy_from_slice(piece);
            write_fully(
                file,
                &bounce.bytes()[..piece.len()],
                at + (i * BOUNCE_BYTES) as u64,
            )?;
        }
    }
    if !tail.is_empty() {
        let mut last = Aligned::new(PAGE_BYTES);
        last.bytes_mut()[..tail.len()].copy_from_slice(tail);
        write_fully(file, last.bytes(), at + whole as u64)?;
    }
    Ok(())
}

/// Gives memory of so many bytes.
pub(crate) type Room<'a> = &'a dyn Fn(usize) -> Result<ChunkMut, Trouble>;

/// Reads a chunk's file into memory that `room` gives, and holds it against its header.
pub(crate) fn read(
    folder: &Folder,
    name: &Name,
    key: &str,
    room: Room<'_>,
) -> Result<(ChunkMut, Description), Trouble> {
    let path = folder.path_of(name);
    let mut given = None;
    let mut attempt = |direct: bool| read_object(folder, &path, direct, key, room, &mut given);
    let direct = folder.direct.load(Ordering::Relaxed);
    match attempt(direct) {
        Err(ReadError::System(error)) if direct && refuses_direct(&error) => {
            folder.direct.store(false, Ordering::Relaxed);
            attempt(false)
        }
        outcome => outcome,
    }
    .map_err(|error| match error {
        ReadError::System(error) => Trouble::system("read a chunk", &error),
        ReadError::Defect(defect) => Trouble::new(defect, name.to_text()),
        ReadError::NoRoom(trouble) => trouble,
    })
}

enum ReadError {
    System(io::Error),
    Defect(Defect),
    NoRoom(Trouble),
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}

impl From<Defect> for ReadError {
    fn from(defect: Defect) -> Self {
        Self::Defect(defect)
    }
}

fn read_object(
    folder: &Folder,
    path: &Path,
    direct: bool,
    key: &str,
    room: Room<'_>,
    given: &mut Option<ChunkMut>,
) -> Result<(ChunkMut, Description), ReadError> {
    let file = folder.files.open(path, Open::Read { direct })?;
    let found = file.bytes()?;
    if found > SMALL_BYTES
        && let Some(read) = read_large(&*file, found, key, room, given)?
    {
        return Ok(read);
    }
    let mut first = Aligned::new(found.clamp(PAGE_BYTES as u64, SMALL_BYTES) as usize);
    let whole_file = found <= SMALL_BYTES;
    let wanted = if whole_file { first.len } else { PAGE_BYTES };
    let count = read_fully(&*file, &mut first.bytes_mut()[..wanted], 0)?;
    let header_bytes = Header::bytes_of(&first.bytes()[..count])?;
    if header_bytes > count {
        if header_bytes as u64 > found {
            return Err(Defect::Truncated.into());
        }
        first = Aligned::new(header_bytes);
        if read_fully(&*file, first.bytes_mut(), 0)? < header_bytes {
            return Err(Defect::Truncated.into());
        }
    }
    let header = Header::parse(first.bytes())?;
    header.require_key(key)?;
    let payload_bytes = payload_bytes(&header, found)?;
    // What was given first is kept: given back and asked for again, it may be another chunk's by then.
    let mut chunk = match given.take() {
        Some(chunk) => chunk,
        None => room(payload_bytes).map_err(ReadError::NoRoom)?,
    };
    if chunk.bytes_mut().len() < payload_bytes {
        chunk = room(payload_bytes).map_err(ReadError::NoRoom)?;
    }
    chunk.truncate(payload_bytes);
    let mut check = header.check();
    if whole_file {
        let rest = first
            .bytes()
            .get(header_bytes..count)
            .ok_or(Defect::Truncated)?;
        let payload = rest.get(..payload_bytes).ok_or(Defect::Truncated)?;
        chunk.bytes_mut().copy_from_slice(payload);
        // Over our copy.
        check.update(chunk.bytes_mut());
        require_zeros(&rest[payload_bytes..])?;
    } else {
        read_payload(&*file, chunk.bytes_mut(), header_bytes as u64, &mut check)?;
    }
    check.finish()?;
    let mut description = header.description;
    if let Some(positions) = description.positions.take() {
        chunk.set_positions(positions);
    }
    Ok((chunk, description))
}

/// Reads a large object whose header is one page, as nearly all are: that page and the payload's beginning with
/// one call, into where they belong. `None` if the header is longer, or the memory is not to be had like that;
/// what memory there is stays in `given`.
///
/// Memory is asked for before anything is read, so that reads of many chunks need not wait for each other's.
fn read_large(
    file: &dyn OpenFile,
    found: u64,
    key: &str,
    room: Room<'_>,
    given: &mut Option<ChunkMut>,
) -> Result<Option<(ChunkMut, Description)>, ReadError> {
    let padded_bytes = usize::try_from(found).unwrap_or(usize::MAX) - PAGE_BYTES;
    if !found.is_multiple_of(PAGE_BYTES as u64) {
        return Ok(None);
    }
    // Whole pages, as the pool gives them; the last one may end in padding.
    if given.is_none() {
        *given = room(padded_bytes).ok();
    }
    let Some(chunk) = given.as_mut() else {
        return Ok(None);
    };
    let into = chunk.bytes_mut();
    if !is_aligned(into) || into.len() != padded_bytes {
        return Ok(None);
    }
    let mut first = Aligned::new(PAGE_BYTES);
    let (beginning, rest) = into.split_at_mut(PIECE_BYTES.min(padded_bytes));
    let count = read_two_fully(file, first.bytes_mut(), beginning, 0)?;
    if Header::bytes_of(&first.bytes()[..count.min(PAGE_BYTES)])? != PAGE_BYTES {
        return Ok(None);
    }
    let header = Header::parse(first.bytes())?;
    header.require_key(key)?;
    let payload_bytes = payload_bytes(&header, found)?;
    if count < PAGE_BYTES + beginning.len() {
        return Err(Defect::Truncated.into());
    }
    let mut check = header.check();
    let mut left = payload_bytes;
    let mut sum = |piece: &[u8]| {
        let (payload, padding) = piece.split_at(left.min(piece.len()));
        left -= payload.len();
        check.update(payload);
        require_zeros(padding)
    };
    sum(beginning)?;
    let mut at = count as u64;
    // Piece by piece: one is summed up while it is near, and others are read meanwhile.
    for piece in rest.chunks_mut(PIECE_BYTES) {
        if read_fully(file, piece, at)? < piece.len() {
            return Err(Defect::Truncated.into());
        }
        sum(piece)?;
        at += piece.len() as u64;
    }
    check.finish()?;
    chunk.truncate(payload_bytes);
    let mut description = header.description;
    if let Some(positions) = description.positions.take() {
        chunk.set_positions(positions);
    }
    Ok(given.take().map(|chunk| (chunk, description)))
}

/// Bytes of the payload, if a file of `found` bytes is what the header says.
fn payload_bytes(header: &Header<'_>, found: u64) -> Result<usize, Defect> {
    let payload_bytes = header.description.payload_bytes;
    let due = payload_bytes
        .checked_add(header.len() as u64)
        .and_then(|bytes| bytes.checked_next_multiple_of(PAGE_BYTES as u64));
    match due {
        Some(due) if due == found => Ok(payload_bytes as usize),
        Some(due) if due < found => Err(Defect::Length),
        _ => Err(Defect::Truncated),
    }
}

/// Reads piece by piece, so that one is summed up while it is near, and others are read meanwhile.
fn read_payload(
    file: &dyn OpenFile,
    into: &mut [u8],
    at: u64,
    check: &mut Check,
) -> Result<(), ReadError> {
    let whole = into.len() - into.len() % PAGE_BYTES;
    let (pages, tail) = into.split_at_mut(whole);
    let mut bounce = (!is_aligned(pages)).then(|| Aligned::new(BOUNCE_BYTES.min(pages.len())));
    for (i, piece) in pages.chunks_mut(BOUNCE_BYTES).enumerate() {
        let at = at + (i * BOUNCE_BYTES) as u64;
        let count = match &mut bounce {
            None => read_fully(file, piece, at)?,
            Some(bounce) => {
                let bounce = &mut bounce.bytes_mut()[..piece.len()];
                let count = read_fully(file, bounce, at)?;
                piece.copy_from_slice(bounce);
                count
            }
        };
        if count < piece.len() {
            return Err(Defect::Truncated.into());
        }
        check.update(piece);
    }
    if !tail.is_empty() {
        let mut last = Aligned::new(PAGE_BYTES);
        if read_fully(file, last.bytes_mut(), at + whole as u64)? < PAGE_BYTES {
            return Err(Defect::Truncated.into());
        }
        tail.copy_from_slice(&last.bytes()[..tail.len()]);
        check.update(tail);
        require_zeros(&last.bytes()[tail.len()..])?;
    }
    Ok(())
}

fn require_zeros(padding: &[u8]) -> Result<(), Defect> {
    if padding.iter().all(|byte| *byte == 0) {
        Ok(())
    } else {
        Err(Defect::Checksum)
    }
}
