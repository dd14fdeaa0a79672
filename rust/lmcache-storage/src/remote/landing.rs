//! Where a value goes as it comes: its payload to the chunk's memory, held against its checksum on the way. A
//! value that lay somewhere in between would cost as much again as receiving it.

use bytes::Bytes;
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::object::ChunkMut;
use tokio::sync::oneshot::{self, Receiver, Sender};
use tokio::task::block_in_place;

use super::Options;
use super::client::Refusal;
use super::value::Serde;
use crate::backend::Arrival;
use crate::compression::Sealed;
use crate::object_form::{Check, Defect, Description, Header, PAGE_BYTES};

/// What is received at a time, so that it is summed up while the processor's cache has it.
const PIECE_BYTES: usize = 256 << 10;

/// More than a header of any chunk: eight bytes a position, and a key.
const MAX_HEADER_BYTES: u64 = 8 * (1 << 20) + 16 * PAGE_BYTES as u64;

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

/// When a chunk is given its memory: in the order of the prefix, so that none takes the room that an earlier one
/// needs.
#[derive(Debug, Default)]
pub(super) struct Turn {
    before: Option<Receiver<()>>,
    behind: Option<Sender<()>>,
}

impl Turn {
    /// That of the first chunk, and then of each behind it.
    pub(super) fn each() -> impl Iterator<Item = Self> {
        let mut before = None;
        std::iter::repeat_with(move || {
            let (behind, next) = oneshot::channel();
            Self {
                before: before.replace(next),
                behind: Some(behind),
            }
        })
    }

    /// Returns when it has come; false if an earlier chunk does not.
    async fn come(&mut self) -> bool {
        let has_come = match &mut self.before {
            Some(before) => before.await.is_ok(),
            None => true,
        };
        self.before = None;
        has_come
    }
}

/// A value on its way in.
///
/// A client [expects](Self::expect) it with its size, and fills the [room](Self::room) for it until there is none,
/// or until all has come. What it was is told at the end: a client need not know.
#[derive(Debug)]
pub struct Landing {
    /// Whose chunk it is to be.
    key: String,
    serde: Serde,
    max_bytes: u64,
    max_payload_bytes: u64,
    pool: LocalCpu,
    turn: Turn,
    due: u64,
    came: u64,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Its beginning: `bytes` are as many as are wanted before more is known, and filled as far as it came.
    Header(Vec<u8>),
    /// Its payload is to come, and has no memory yet.
    Placing(Box<(Description, Check)>),
    Payload(Box<Payload>),
    /// Packed: unpacked as a whole.
    Packed(Vec<u8>),
    /// The rest is of no use.
    Unusable(Unusable),
}

#[derive(Debug)]
struct Payload {
    description: Description,
    check: Check,
    chunk: ChunkMut,
    at: usize,
}

impl Landing {
    /// A value that is to be the chunk of `key`, in memory of `pool`.
    pub(super) fn new(key: String, options: &Options, pool: LocalCpu, turn: Turn) -> Self {
        // No more than fits: what is larger is not ours to read.
        let most = pool.capacity_bytes() + MAX_HEADER_BYTES;
        Self {
            key,
            serde: options.serde,
            max_bytes: most.min(options.max_value_bytes),
            max_payload_bytes: options.max_value_bytes,
            pool,
            turn,
            due: 0,
            came: 0,
            state: State::Header(Vec::new()),
        }
    }

    /// Bytes of the largest value that is taken.
    pub fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// A value of so many bytes begins; what came of another one before is forgotten.
    ///
    /// # Errors
    /// [`Refusal::TooLarge`].
    pub fn expect(&mut self, bytes: u64) -> Result<(), Refusal> {
        if bytes > self.max_bytes {
            return Err(Refusal::TooLarge);
        }
        (self.due, self.came) = (bytes, 0);
        self.state = match self.serde {
            Serde::Naive => State::Header(vec![0; bytes.min(PAGE_BYTES as u64) as usize]),
            Serde::Lossless => State::Packed(Vec::with_capacity(bytes as usize)),
        };
        Ok(())
    }

    /// Where the next bytes go, never more than are missing. Empty when all have come, or when the rest is not
    /// wanted any more. A payload waits for its memory until the chunks before it have theirs.
    pub async fn room(&mut self) -> &mut [u8] {
        if let State::Placing(of) = &self.state {
            let bytes = of.0.payload_bytes;
            let placed = self.place(bytes).await;
            self.place_payload(placed);
        }
        let came = self.came as usize;
        match &mut self.state {
            State::Header(bytes) => &mut bytes[came..],
            State::Payload(payload) => {
                let bytes = payload.chunk.bytes_mut();
                let end = bytes.len().min(payload.at + PIECE_BYTES);
                &mut bytes[payload.at..end]
            }
            State::Packed(bytes) => {
                let end = (self.due as usize).min(came + PIECE_BYTES);
                bytes.resize(end, 0);
                &mut bytes[came..]
            }
            State::Placing(_) | State::Unusable(_) => &mut [],
        }
    }

    /// So many bytes of the room are filled.
    pub fn filled(&mut self, bytes: usize) {
        self.came += bytes as u64;
        match &mut self.state {
            State::Header(header) => {
                if self.came == header.len() as u64
                    && let Err(unusable) = self.read_header()
                {
                    self.state = State::Unusable(unusable);
                }
            }
            State::Payload(payload) => {
                let end = payload.at + bytes;
                payload
                    .check
                    .update(&payload.chunk.bytes_mut()[payload.at..end]);
                payload.at = end;
            }
            State::Placing(_) | State::Packed(_) | State::Unusable(_) => {}
        }
    }

    /// Takes bytes in that lie elsewhere; false if there is no room for all of them.
    pub async fn push(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let room = self.room().await;
            if room.is_empty() {
                return false;
            }
            let count = room.len().min(bytes.len());
            room[..count].copy_from_slice(&bytes[..count]);
            self.filled(count);
            bytes = &bytes[count..];
        }
        true
    }

    /// Bytes that have come.
    pub(super) fn came(&self) -> u64 {
        self.came
    }

    /// Whether every byte has come.
    pub fn is_whole(&self) -> bool {
        self.came == self.due
    }

    /// Takes a value in that lies elsewhere.
    ///
    /// # Errors
    /// [`Refusal::TooLarge`].
    pub async fn take(&mut self, value: &Bytes) -> Result<(), Refusal> {
        self.expect(value.len() as u64)?;
        self.push(value).await;
        Ok(())
    }

    /// All that there is of the beginning has come: it is read as far as it goes.
    fn read_header(&mut self) -> Result<(), Unusable> {
        let State::Header(bytes) = &mut self.state else {
            return Ok(());
        };
        let wanted = Header::bytes_of(bytes)?;
        if wanted > bytes.len() {
            if wanted as u64 > self.due {
                return Err(Defect::Truncated.into());
            }
            bytes.resize(wanted, 0);
            return Ok(());
        }
        let header = Header::parse(bytes)?;
        header.require_key(&self.key)?;
        let payload_bytes = header.description.payload_bytes;
        // Before memory is taken for what may be nonsense.
        match (self.due - self.came).cmp(&payload_bytes) {
            std::cmp::Ordering::Less => return Err(Defect::Truncated.into()),
            std::cmp::Ordering::Greater => return Err(Defect::Length.into()),
            std::cmp::Ordering::Equal => {}
        }
        let check = header.check();
        self.state = State::Placing(Box::new((header.description, check)));
        Ok(())
    }

    fn place_payload(&mut self, placed: Result<ChunkMut, Unusable>) {
        let due = State::Header(Vec::new());
        let State::Placing(of) = std::mem::replace(&mut self.state, due) else {
            return;
        };
        let (description, check) = *of;
        self.state = match placed {
            Ok(chunk) => State::Payload(Box::new(Payload {
                description,
                check,
                chunk,
                at: 0,
            })),
            Err(unusable) => State::Unusable(unusable),
        };
    }

    /// Memory for a payload, when it is its turn.
    async fn place(&mut self, bytes: u64) -> Result<ChunkMut, Unusable> {
        if !self.turn.come().await {
            return Err(Unusable::NoRoom(bytes));
        }
        let allocated = self.pool.allocate(&[bytes as usize]);
        let chunk = allocated.and_then(|mut one| one.pop());
        let chunk = chunk.ok_or(Unusable::NoRoom(bytes))?;
        if let Some(behind) = self.turn.behind.take() {
            // Gone, if nobody asks for the next one.
            let _ = behind.send(());
        }
        Ok(chunk)
    }

    /// The chunk, verified.
    pub(super) async fn finish(mut self) -> Result<Arrival, Unusable> {
        // One without a payload was never asked for room.
        self.room().await;
        let state = std::mem::replace(&mut self.state, State::Header(Vec::new()));
        let (mut chunk, mut description) = match state {
            State::Unusable(unusable) => return Err(unusable),
            // Its end came before that of its header.
            State::Header(_) | State::Placing(_) => return Err(Defect::Truncated.into()),
            State::Payload(payload) => {
                payload.check.finish()?;
                (payload.chunk, payload.description)
            }
            State::Packed(bytes) => {
                // As long as a large copy and more: others go on meanwhile.
                let (key, most) = (self.key.clone(), self.max_payload_bytes);
                let sealed = block_in_place(|| Sealed::open(&bytes, &key, most))?;
                let mut chunk = self.place(sealed.description.payload_bytes).await?;
                block_in_place(|| sealed.unpack(chunk.bytes_mut()))?;
                (chunk, sealed.description)
            }
        };
        if let Some(positions) = description.positions.take() {
            chunk.set_positions(positions);
        }
        Ok(Arrival { chunk, description })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::object_form;

    const KEY: &str = "model=m@world=1@worker=0@dtype=half/0011";

    fn description(payload: &[u8], positions: Option<Box<[i64]>>) -> Description {
        Description {
            key: KEY.to_owned(),
            payload_bytes: payload.len() as u64,
            num_tokens: positions.as_ref().map_or(3, |each| each.len() as u32),
            form: None,
            positions,
        }
    }

    /// What comes of something that waits for nothing.
    fn ready<T>(future: impl Future<Output = T>) -> T {
        future.now_or_never().expect("nothing is before it")
    }

    fn pool(bytes: u64) -> LocalCpu {
        LocalCpu::new(bytes, Duration::from_secs(60)).expect("memory")
    }

    fn landing(pool: &LocalCpu, key: &str, options: &Options) -> Landing {
        Landing::new(key.to_owned(), options, pool.clone(), Turn::default())
    }

    /// What a value becomes that comes in pieces of so many bytes: its payload, or why there is none.
    fn land(pool: &LocalCpu, value: &[u8], key: &str, piece: usize) -> Result<Vec<u8>, String> {
        let mut landing = landing(pool, key, &Options::default());
        landing.expect(value.len() as u64).expect("small enough");
        for part in value.chunks(piece) {
            if !ready(landing.push(part)) {
                assert!(ready(landing.room()).is_empty(), "and stays so");
                break;
            }
        }
        match ready(landing.finish()) {
            Ok(mut arrival) => Ok(arrival.chunk.bytes_mut().to_vec()),
            Err(Unusable::Defect(defect)) => Err(defect.name().to_owned()),
            Err(Unusable::NoRoom(bytes)) => Err(format!("no room for {bytes}")),
        }
    }

    #[test]
    fn a_value_is_what_it_is_in_whatever_pieces_it_comes() {
        let pool = pool(4 << 20);
        let payload: Vec<u8> = (0..600_001_u32).map(|at| (at * 7) as u8).collect();
        let payloads = [&payload[..], &payload[..1], &payload[..PIECE_BYTES]];
        let positions = [None, Some((0..2000).map(|at| at * 3).collect())];
        for (payload, positions) in payloads
            .iter()
            .flat_map(|p| positions.iter().map(move |q| (p, q)))
        {
            let description = description(payload, positions.clone());
            let header = description.seal(payload).expect("fits");
            let value = [&header[..], payload].concat();
            for piece in [1, 4095, 4096, 4097, 100_000, value.len()] {
                if piece > 1 || value.len() < 100_000 {
                    assert_eq!(land(&pool, &value, KEY, piece), Ok(payload.to_vec()));
                }
            }
            for end in [0, 1, 8, 63, 4095, 4096, header.len(), value.len() - 1] {
                let cut = &value[..end];
                let due = object_form::read(cut, KEY).expect_err("cut").name();
                for piece in [1000, cut.len().max(1)] {
                    assert_eq!(land(&pool, cut, KEY, piece), Err(due.to_owned()), "{end}");
                }
            }
            let mut spoilt = value.clone();
            for at in (0..value.len()).step_by(value.len() / 300 + 1) {
                spoilt[at] ^= 1;
                let due = object_form::read(&spoilt, KEY).expect_err("spoilt").name();
                let found = land(&pool, &spoilt, KEY, 50_000).expect_err("spoilt");
                // Sizes are held against each other before the checksum is.
                assert!(
                    found == due || found == "length" || found == "truncated",
                    "{at}: {found}"
                );
                spoilt[at] ^= 1;
            }
            let longer = [&value[..], b"x"].concat();
            assert_eq!(land(&pool, &longer, KEY, 5000), Err("length".to_owned()));
            assert_eq!(
                land(&pool, &value, "another", 5000),
                Err("foreign".to_owned())
            );
        }
        let audit = pool.audit();
        assert_eq!(
            audit.free_bytes, audit.capacity_bytes,
            "all of it came back"
        );
    }

    #[test]
    fn what_does_not_fit_is_not_taken() {
        let pool = pool(1 << 20);
        let payload = vec![7; 1 << 19];
        let header = description(&payload, None).seal(&payload).expect("fits");
        let value = [&header[..], &payload].concat();
        let held: Vec<_> = pool.allocate(&[1 << 19, 1 << 18]).expect("room");
        let no_room = Err(format!("no room for {}", 1 << 19));
        assert_eq!(land(&pool, &value, KEY, 5000), no_room);
        drop(held);
        assert_eq!(land(&pool, &value, KEY, 5000), Ok(payload));
        let options = Options {
            max_value_bytes: 10,
            ..Options::default()
        };
        let mut landing = landing(&pool, KEY, &options);
        assert_eq!(landing.expect(11), Err(Refusal::TooLarge));
    }

    #[test]
    fn a_value_begins_anew_where_its_connection_broke() {
        let pool = pool(1 << 20);
        let payload = vec![7; 10_000];
        let header = description(&payload, None).seal(&payload).expect("fits");
        let value = [&header[..], &payload].concat();
        let mut landing = landing(&pool, KEY, &Options::default());
        for end in [3, 4096, 9000, value.len()] {
            landing.expect(value.len() as u64).expect("small enough");
            assert!(ready(landing.push(&value[..end])));
            assert_eq!(landing.is_whole(), end == value.len());
        }
        let mut arrival = ready(landing.finish()).expect("whole");
        assert_eq!(arrival.chunk.bytes_mut(), &payload[..]);
    }

    #[test]
    fn memory_is_given_in_the_order_of_the_prefix() {
        let pool = pool(1 << 20);
        let payload = vec![7; 10_000];
        let header = description(&payload, None).seal(&payload).expect("fits");
        let value = [&header[..], &payload].concat();
        let is_all_free = || pool.audit().free_bytes == pool.capacity_bytes();
        for comes in [true, false] {
            let mut both = Turn::each().map(|turn| {
                let (key, pool) = (KEY.to_owned(), pool.clone());
                let mut landing = Landing::new(key, &Options::default(), pool, turn);
                landing.expect(value.len() as u64).expect("small enough");
                landing
            });
            let (mut first, mut second) = (both.next().expect("one"), both.next().expect("two"));
            {
                let mut pushing = Box::pin(second.push(&value));
                assert!(pushing.as_mut().now_or_never().is_none(), "not yet");
                assert!(is_all_free());
                if comes {
                    assert!(ready(first.push(&value)));
                } else {
                    drop(first);
                }
                assert_eq!(pushing.as_mut().now_or_never(), Some(comes));
            }
            assert_eq!(ready(second.finish()).is_ok(), comes);
        }
    }
}
