//! A reader of another rank's pool against the server, against hostile peers, and against its own end.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lmcache_core::hash::ChunkHash;
use lmcache_core::hot_cache::Policy;
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::mapped::Keeper;
use lmcache_memory::object::Place;
use lmcache_memory::region::PAGE_BYTES;
use lmcache_storage::lookup_client::{Connections, Event, Peer};
use lmcache_storage::lookup_reader::{ReaderError, RegionReader};
use lmcache_storage::lookup_server::{LookupIndex, LookupServer};
use lmcache_storage::wire::{self, Answer, Status};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tempfile::TempDir;

const SECRET: &[u8] = b"the scheduler's";
const READERS: &[u8] = b"a reader's";
const LEASE: Duration = Duration::from_secs(600);
/// Long, for what is to succeed on a busy machine.
const PATIENT: Duration = Duration::from_secs(60);

fn hashes(ids: impl IntoIterator<Item = u8>) -> Vec<ChunkHash> {
    ids.into_iter().map(|id| ChunkHash([id; 32])).collect()
}

struct Room {
    cpu: LocalCpu,
    server: LookupServer,
    path: PathBuf,
    _folder: TempDir,
}

/// A pool of `pages` chunks of a page each, with the chain `1..=stored` in it.
fn room(pages: u64, stored: u8) -> Room {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("lookup/0.sock");
    let size = pages * PAGE_BYTES as u64;
    let cpu = LocalCpu::shared(size, LEASE, Policy::default(), 1).expect("a few pages");
    let index: Arc<dyn LookupIndex> = Arc::new(cpu.clone());
    let server = LookupServer::start_shared(&path, index, SECRET, READERS).expect("a fresh path");
    let room = Room {
        cpu,
        server,
        path,
        _folder: folder,
    };
    store(&room.cpu, &hashes(1..=stored));
    room
}

/// Each chunk is filled with its id; how many found room.
fn store(cpu: &LocalCpu, chain: &[ChunkHash]) -> usize {
    let mut reserved = cpu.reserve("ns", chain, 0, |_| PAGE_BYTES);
    for (position, chunk) in &mut reserved.chunks {
        chunk.bytes_mut().fill(chain[*position].0[0]);
    }
    let chunks: Vec<_> = reserved
        .chunks
        .into_iter()
        .map(|(_, chunk)| chunk)
        .collect();
    let stored = chunks.len();
    cpu.commit("ns", chain, chunks);
    stored
}

fn peer(path: &Path, secret: &[u8]) -> Peer {
    Peer {
        path: path.into(),
        secret: secret.into(),
    }
}

fn reader(room: &Room) -> RegionReader {
    RegionReader::connect(peer(&room.path, READERS), PATIENT).expect("it is served")
}

fn wait_for(what: impl Fn() -> bool) {
    let until = Instant::now() + PATIENT;
    while !what() {
        assert!(Instant::now() < until, "it never came");
        thread::sleep(Duration::from_millis(2));
    }
}

fn is_nothing_held(cpu: &LocalCpu) -> bool {
    cpu.audit().leased_bytes == 0
}

#[test]
fn what_the_owner_stored_is_read_and_held_until_it_is_let_go() {
    let room = room(4, 4);
    let reader = reader(&room);
    assert_eq!(reader.capacity_bytes(), 4 * PAGE_BYTES as u64);
    let chain = hashes(1..=4);
    let chunks = reader.hold("r", "ns", &chain[1..]);
    assert_eq!(chunks.len(), 3);
    for (chunk, hash) in chunks.iter().zip(&chain[1..]) {
        assert_eq!(chunk.len(), PAGE_BYTES);
        assert!(chunk.bytes().iter().all(|&byte| byte == hash.0[0]));
    }
    // Only the first chunk of the full pool may go.
    assert_eq!(store(&room.cpu, &hashes(100..104)), 1);
    assert!(chunks[0].bytes().iter().all(|&byte| byte == 2));
    assert!(reader.let_go("r", 3));
    assert!(
        is_nothing_held(&room.cpu),
        "given back before it is answered"
    );
    assert!(!reader.let_go("r", 3), "it is held no more");
    assert_eq!(store(&room.cpu, &hashes(110..114)), 4);
}

#[test]
fn a_share_of_the_lease_outlives_clear_and_the_owners_own_share() {
    let room = room(8, 3);
    let chain = hashes(1..=3);
    assert_eq!(room.cpu.lookup("r", "ns", &chain).num_chunks, 3);
    assert_eq!(room.cpu.take("r", "ns", &chain).len(), 3);
    room.cpu.clear();
    let reader = reader(&room);
    assert!(
        reader.hold("another", "ns", &chain).is_empty(),
        "found no more"
    );
    assert_eq!(reader.hold("r", "ns", &chain).len(), 3);
    assert_eq!(room.cpu.audit().num_leases, 0, "the last share is taken");
    assert!(reader.let_go("r", 3));
}

#[test]
fn what_is_held_for_a_lookup_is_not_replaced_under_its_reader() {
    let room = room(4, 4);
    let reader = reader(&room);
    let chain = hashes(1..=4);
    assert_eq!(reader.hold("r", "ns", &chain[..2]).len(), 2);
    assert!(reader.hold("r", "ns", &chain[2..]).is_empty());
    assert_eq!(store(&room.cpu, &hashes(100..104)), 2, "the first two stay");
    assert!(reader.let_go("r", 2));
}

#[test]
fn a_reader_that_ends_gives_back_what_was_held_for_it() {
    let room = room(4, 4);
    let reader = reader(&room);
    assert_eq!(reader.hold("r", "ns", &hashes(1..=4)).len(), 4);
    assert!(!is_nothing_held(&room.cpu));
    drop(reader);
    wait_for(|| is_nothing_held(&room.cpu));
}

#[test]
fn what_a_server_that_ends_has_held_counts_for_nothing() {
    let room = room(4, 4);
    let reader = reader(&room);
    let chunks = reader.hold("r", "ns", &hashes(1..=4));
    room.server.close();
    assert!(is_nothing_held(&room.cpu));
    // The mapping is the reader's own; what is in it is anybody's.
    assert_eq!(chunks[0].bytes().len(), PAGE_BYTES);
    assert!(!reader.let_go("r", 4));
    assert!(reader.hold("r", "ns", &hashes(1..=4)).is_empty());
    assert_eq!(reader.capacity_bytes(), 0);
    // Another server at the same place is found by the next question.
    let index: Arc<dyn LookupIndex> = Arc::new(room.cpu.clone());
    let again = LookupServer::start_shared(&room.path, index, SECRET, READERS);
    let _again = again.expect("a free path");
    assert!(!reader.let_go("r", 4), "it has held nothing");
    assert_eq!(reader.hold("r", "ns", &hashes(1..=4)).len(), 4);
    assert!(reader.let_go("r", 4));
}

#[test]
fn a_connection_that_was_made_anew_has_held_nothing() {
    let room = room(4, 4);
    let reader = reader(&room);
    assert_eq!(reader.hold("a", "ns", &hashes(1..=4)).len(), 4);
    reader.close();
    assert_eq!(reader.hold("b", "ns", &hashes(1..=4)).len(), 4);
    assert!(!reader.let_go("a", 4));
    assert!(reader.let_go("b", 4));
}

#[test]
fn readers_and_clients_ask_only_what_is_theirs_and_do_not_end_each_other() {
    let room = room(4, 4);
    let reader = reader(&room);
    let mut clients = Connections::new(vec![peer(&room.path, SECRET)]);
    assert!(clients.connect());
    let packed = [1; 32];
    let answers = |clients: &mut Connections, message: Vec<u8>| {
        assert!(clients.send(&message, &[0]));
        let until = Instant::now() + PATIENT;
        loop {
            match clients.receive(PATIENT)[..] {
                [(0, Event::Answer(answer))] => break answer.status,
                // The introduction comes first.
                [] => assert!(Instant::now() < until, "no answer"),
                ref other => panic!("{other:?}"),
            }
        }
    };
    for (id, message) in [
        wire::encode_locate(1, "r", "ns", &packed),
        wire::encode_done(2, "r"),
        wire::encode_map(3),
    ]
    .into_iter()
    .enumerate()
    {
        let status = answers(&mut clients, message);
        assert_eq!(status, Status::UnknownKind, "message {id}");
    }
    let lookup = wire::encode_lookup(4, "r", "ns", &packed);
    assert_eq!(answers(&mut clients, lookup), Status::Ok);
    let mut readers = Connections::new(vec![peer(&room.path, READERS)]);
    assert!(readers.connect());
    for (id, message) in [
        wire::encode_lookup(1, "r", "ns", &packed),
        wire::encode_release(2, "r"),
        wire::encode_clear(3),
    ]
    .into_iter()
    .enumerate()
    {
        let status = answers(&mut readers, message);
        assert_eq!(status, Status::UnknownKind, "message {id}");
    }
    assert_eq!(answers(&mut readers, wire::encode_ping(4)), Status::Ok);
    assert_eq!(room.cpu.audit().num_leases, 1, "the client's stands");
    let still = answers(&mut clients, wire::encode_ping(5));
    assert_eq!(still, Status::Ok, "its connection, too");
    assert_eq!(
        reader.hold("r", "ns", &hashes(1..=4)).len(),
        4,
        "and so does the reader"
    );
    assert!(reader.let_go("r", 4));
}

#[test]
fn a_stranger_and_a_pool_that_is_not_shared_are_no_pool() {
    let room = room(4, 1);
    for secret in [SECRET, b"", b"a reader'S"] {
        let refused = RegionReader::connect(peer(&room.path, secret), PATIENT);
        assert!(refused.is_err(), "{secret:?}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("lookup/1.sock");
    let own = LocalCpu::new(1 << 16, LEASE).expect("a few pages");
    let index: Arc<dyn LookupIndex> = Arc::new(own);
    let _server = LookupServer::start_shared(&path, index, SECRET, READERS).expect("a fresh path");
    let refused = RegionReader::connect(peer(&path, READERS), PATIENT).expect_err("not shared");
    assert!(
        refused.to_string().contains("gives no pool away"),
        "{refused}"
    );
    let nobody = RegionReader::connect(peer(&folder.path().join("no"), READERS), PATIENT);
    let error = nobody.expect_err("nobody listens");
    assert!(matches!(error, ReaderError::System { .. }), "{error}");
}

/// A peer that greets like a server and then says what the test wants.
fn hostile(
    said: impl FnOnce(UnixStream) + Send + 'static,
) -> (PathBuf, TempDir, thread::JoinHandle<()>) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("s");
    let listener = UnixListener::bind(&path).expect("a fresh path");
    let thread = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("the reader connects");
        let mut greeting = [0; 64];
        stream.read_exact(&mut greeting).expect("it greets");
        stream.write_all(&greeting).expect("it reads");
        stream
            .write_all(b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06ROUTER")
            .expect("it reads");
        said(stream);
    });
    (path, folder, thread)
}

fn framed(body: &[u8]) -> Vec<u8> {
    let mut out = vec![0, body.len() as u8];
    out.extend(body);
    out
}

fn ok(message_id: u64) -> Vec<u8> {
    framed(&wire::encode_answer(&Answer {
        message_id,
        status: Status::Ok,
        hit_chunks: 0,
        lease_ms: 0,
    }))
}

fn send_along(stream: &UnixStream, bytes: &[u8], along: BorrowedFd<'_>) {
    let descriptors = [along];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(
        stream,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::empty(),
    )
    .expect("sent");
}

/// Reads what the reader sends until it goes.
fn drain(stream: &mut UnixStream) {
    let _ = stream.read_to_end(&mut Vec::new());
}

#[test]
fn what_is_no_pool_is_not_mapped() {
    let whole_answers: [(Vec<u8>, Option<OwnedFd>); 5] = [
        (ok(1), None),
        (
            ok(2),
            LocalCpu::shared(1 << 16, LEASE, Policy::default(), 1)
                .expect("a pool")
                .descriptor(),
        ),
        (
            ok(1),
            Some(std::fs::File::open("/dev/zero").expect("a device").into()),
        ),
        (framed(b"hello"), None),
        (
            vec![2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
            None,
        ),
    ];
    for (at, (bytes, along)) in whole_answers.into_iter().enumerate() {
        let (path, _folder, thread) = hostile(move |mut stream| {
            match along {
                Some(along) => send_along(&stream, &bytes, along.as_fd()),
                None => stream.write_all(&bytes).expect("it reads"),
            }
            drain(&mut stream);
        });
        let refused = RegionReader::connect(peer(&path, READERS), PATIENT);
        assert!(refused.is_err(), "answer {at}");
        thread.join().expect("no panic there");
    }
}

#[test]
fn places_that_nobody_asked_for_or_that_are_not_there_are_no_chunks() {
    let size = 4 * PAGE_BYTES as u64;
    let place = |offset, len| Place { offset, len };
    let bad: [Vec<u8>; 6] = [
        wire::encode_places(2, [place(size - 1, 2)].into_iter()),
        wire::encode_places(2, [place(u64::MAX, u64::MAX)].into_iter()),
        wire::encode_places(2, [place(0, 1), place(1, 1), place(2, 1)].into_iter()),
        wire::encode_places(7, [place(0, 1)].into_iter()),
        b"\x93\x01\x02\xc4\x07abcdefg".to_vec(),
        Vec::new(),
    ];
    for (at, body) in bad.into_iter().enumerate() {
        let (path, _folder, thread) = hostile(move |mut stream| {
            let cpu = LocalCpu::shared(size, LEASE, Policy::default(), 1).expect("a pool");
            let descriptor = cpu.descriptor().expect("shared");
            send_along(&stream, &ok(1), descriptor.as_fd());
            stream.write_all(&framed(&body)).expect("it reads");
            drain(&mut stream);
        });
        let reader = RegionReader::connect(peer(&path, READERS), PATIENT).expect("a pool");
        assert!(
            reader.hold("r", "ns", &hashes(1..=2)).is_empty(),
            "answer {at}"
        );
        assert_eq!(
            reader.capacity_bytes(),
            0,
            "answer {at}: the connection is given up"
        );
        thread.join().expect("no panic there");
    }
}

#[test]
fn a_server_that_says_nothing_is_given_up_after_the_deadline() {
    let (path, _folder, thread) = hostile(|mut stream| drain(&mut stream));
    let deadline = Duration::from_millis(50);
    let refused = RegionReader::connect(peer(&path, READERS), deadline).expect_err("silence");
    assert!(matches!(refused, ReaderError::Timeout { .. }), "{refused}");
    thread.join().expect("no panic there");
}
