//! The client against real servers, against what only looks like one, and beside peers that mean no good.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use lmcache_core::hash::ChunkHash;
use lmcache_storage::lookup_client::{Connections, Event, Peer};
use lmcache_storage::lookup_server::{LookupAnswer, LookupIndex, LookupServer, LookupServerStats};
use lmcache_storage::wire::{self, Answer, Status};
use tempfile::TempDir;

const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const PATIENCE: Duration = Duration::from_secs(20);

/// Holds every chunk; a lookup named `wait` is not answered before the gate opens.
#[derive(Default)]
struct Double {
    leases: Mutex<HashMap<String, usize>>,
    gate: Mutex<()>,
}

impl Double {
    fn leases(&self) -> HashMap<String, usize> {
        self.leases.lock().expect("no panic inside").clone()
    }
}

impl LookupIndex for Double {
    fn lookup(&self, lookup_id: &str, _namespace: &str, hashes: &[ChunkHash]) -> LookupAnswer {
        if lookup_id == "wait" {
            drop(self.gate.lock().expect("no panic inside"));
        }
        let mut leases = self.leases.lock().expect("no panic inside");
        leases.insert(lookup_id.into(), hashes.len());
        LookupAnswer {
            hit_chunks: hashes.len() as u32,
            lease_ms: 5_000,
        }
    }

    fn release(&self, lookup_id: &str) {
        self.leases
            .lock()
            .expect("no panic inside")
            .remove(lookup_id);
    }

    fn clear(&self) {}
}

struct Rank {
    server: LookupServer,
    index: Arc<Double>,
    path: PathBuf,
}

fn rank(folder: &TempDir, name: &str) -> Rank {
    let path = folder.path().join("lookup").join(name);
    let index = Arc::new(Double::default());
    let server = LookupServer::start(&path, Arc::<Double>::clone(&index), SECRET);
    let server = server.expect("a fresh path");
    Rank {
        server,
        index,
        path,
    }
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

fn connections<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Connections {
    let peer = |path: &Path| Peer {
        path: path.into(),
        secret: SECRET.into(),
    };
    Connections::new(paths.into_iter().map(peer).collect())
}

fn lookup(message_id: u64, lookup_id: &str, num_chunks: usize) -> Vec<u8> {
    wire::encode_lookup(message_id, lookup_id, "ns", &vec![1; 32 * num_chunks])
}

/// The next events, until there are `count` of them.
fn receive(connections: &mut Connections, count: usize) -> Vec<(usize, Event)> {
    let deadline = Instant::now() + PATIENCE;
    let mut events = Vec::new();
    while events.len() < count {
        assert!(Instant::now() < deadline, "{events:?}");
        events.extend(connections.receive(Duration::from_millis(100)));
    }
    events
}

fn answered(rank: usize, message_id: u64, hit_chunks: u32) -> (usize, Event) {
    let answer = Answer {
        message_id,
        status: Status::Ok,
        hit_chunks,
        lease_ms: 5_000,
    };
    (rank, Event::Answer(answer))
}

fn wait_for(server: &LookupServer, what: impl Fn(&LookupServerStats) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !what(&server.stats()) {
        assert!(Instant::now() < deadline, "{:?}", server.stats());
        thread::sleep(Duration::from_millis(2));
    }
}

fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// READY of a DEALER with this identity.
fn ready(identity: &[u8]) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity".to_vec();
    body.extend((identity.len() as u32).to_be_bytes());
    body.extend(identity);
    let mut frame = vec![4, body.len() as u8];
    frame.extend(body);
    frame
}

fn frame(message: &[u8]) -> Vec<u8> {
    let mut frame = vec![2];
    frame.extend((message.len() as u64).to_be_bytes());
    frame.extend(message);
    frame
}

/// Whether the server ended the connection, whatever it said before.
fn is_ended(peer: &mut UnixStream) -> bool {
    peer.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let mut rest = Vec::new();
    match peer.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

// --- many ranks -----------------------------------------------------------------------------------

#[test]
fn every_rank_is_asked_and_answers_under_its_number() {
    let folder = folder();
    let ranks = ["0", "1", "2"].map(|name| rank(&folder, name));
    let mut connections = connections(ranks.iter().map(|rank| rank.path.as_path()));
    assert!(connections.connect());
    assert!(connections.send(&lookup(1, "r", 4), &[0, 1, 2]));
    let mut events = receive(&mut connections, 3);
    events.sort_by_key(|(rank, _)| *rank);
    assert_eq!(events, [0, 1, 2].map(|rank| answered(rank, 1, 4)));
    assert!(connections.send(&lookup(2, "r", 2), &[1]));
    assert_eq!(receive(&mut connections, 1), [answered(1, 2, 2)]);
    assert_eq!(connections.post(&wire::encode_release(3, "r")), [0usize; 0]);
    for rank in &ranks {
        wait_for(&rank.server, |stats| stats.releases == 1);
        assert!(rank.index.leases().is_empty());
    }
}

#[test]
fn where_one_rank_is_missing_none_is_asked_and_all_others_are_told() {
    let folder = folder();
    let there = rank(&folder, "0");
    let missing = folder.path().join("lookup/1");
    let mut connections = connections([there.path.as_path(), &missing]);
    assert!(!connections.connect());
    assert!(!connections.send(&lookup(1, "r", 4), &[0, 1]));
    assert!(connections.send(&lookup(2, "r", 4), &[0]));
    assert_eq!(receive(&mut connections, 1), [answered(0, 2, 4)]);
    assert_eq!(connections.post(&wire::encode_release(3, "r")), [1]);
    wait_for(&there.server, |stats| stats.releases == 1);
    assert_eq!(there.server.stats().lookups, 1);
    let _late = rank(&folder, "1");
    assert!(connections.connect());
}

#[test]
fn a_server_that_ends_is_told_once_and_its_successor_is_reached() {
    let folder = folder();
    let first = rank(&folder, "0");
    let mut connections = connections([first.path.as_path()]);
    assert!(connections.connect());
    assert!(connections.send(&lookup(1, "r", 4), &[0]));
    receive(&mut connections, 1);
    first.server.close();
    assert_eq!(receive(&mut connections, 1), [(0, Event::Lost)]);
    assert_eq!(connections.receive(Duration::ZERO), []);
    assert!(!connections.connect());
    let _second = rank(&folder, "0");
    assert!(connections.connect());
    // Message ids go on rising.
    assert!(connections.send(&lookup(2, "r", 3), &[0]));
    assert_eq!(receive(&mut connections, 1), [answered(0, 2, 3)]);
}

// --- what only looks like a server ----------------------------------------------------------------

/// Listens, and does what it is told with the one connection it accepts.
fn impostor(
    folder: &TempDir,
    act: impl FnOnce(UnixStream) + Send + 'static,
) -> (Connections, thread::JoinHandle<()>) {
    let path = folder.path().join("impostor");
    let listener = UnixListener::bind(&path).expect("a fresh path");
    let acting = thread::spawn(move || act(listener.accept().expect("the client comes").0));
    let mut connections = connections([path.as_path()]);
    let deadline = Instant::now() + PATIENCE;
    while !connections.connect() {
        assert!(Instant::now() < deadline);
    }
    (connections, acting)
}

/// Introduces itself as a server does, and hears the client out.
fn introduce(stream: &mut UnixStream) {
    let mut heard = vec![0; 64 + ready(SECRET).len()];
    stream.read_exact(&mut heard).expect("greeting and READY");
    assert!(heard.ends_with(SECRET));
    stream.write_all(&greeting()).expect("the client reads");
    stream
        .write_all(b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06ROUTER")
        .expect("the client reads");
}

fn good_answer(message_id: u64) -> Vec<u8> {
    wire::encode_answer(&Answer {
        message_id,
        status: Status::Ok,
        hit_chunks: 3,
        lease_ms: 5_000,
    })
}

#[test]
fn an_answer_in_single_bytes_arrives_whole() {
    let folder = folder();
    let (mut connections, acting) = impostor(&folder, |mut stream| {
        introduce(&mut stream);
        for byte in [frame(&good_answer(1)), frame(&good_answer(2))].concat() {
            stream.write_all(&[byte]).expect("the client reads");
            thread::sleep(Duration::from_micros(200));
        }
        thread::sleep(Duration::from_millis(50));
    });
    assert_eq!(
        receive(&mut connections, 2),
        [answered(0, 1, 3), answered(0, 2, 3)]
    );
    acting.join().expect("it did as told");
}

#[test]
fn what_is_no_answer_is_told_and_the_next_one_is_read() {
    let folder = folder();
    let (mut connections, acting) = impostor(&folder, |mut stream| {
        introduce(&mut stream);
        // Noise, a command, a truncated answer, one of several frames, and a good one.
        let mut bytes = frame(b"noise");
        bytes.extend(b"\x04\x05\x04PING");
        bytes.extend(frame(&good_answer(1)[..5]));
        bytes.extend([1, 1, b'x']);
        bytes.extend(frame(&good_answer(2)));
        bytes.extend(frame(&good_answer(3)));
        stream.write_all(&bytes).expect("the client reads");
        thread::sleep(Duration::from_millis(50));
    });
    let mut expected = vec![(0, Event::Malformed); 3];
    expected.push(answered(0, 3, 3));
    assert_eq!(receive(&mut connections, 4), expected);
    acting.join().expect("it did as told");
}

#[test]
fn a_peer_that_speaks_something_else_or_too_much_is_given_up() {
    let no_zmtp: fn(UnixStream) = |mut stream| {
        let _ = stream.write_all(&[b'G'; 200]);
        is_ended(&mut stream);
    };
    let a_dealer: fn(UnixStream) = |mut stream| {
        let _ = stream.write_all(&greeting());
        let _ = stream.write_all(&ready(b""));
        is_ended(&mut stream);
    };
    let an_answer_before_ready: fn(UnixStream) = |mut stream| {
        let _ = stream.write_all(&greeting());
        let _ = stream.write_all(&frame(&good_answer(1)));
        is_ended(&mut stream);
    };
    let too_much: fn(UnixStream) = |mut stream| {
        introduce(&mut stream);
        let _ = stream.write_all(&[2, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
        is_ended(&mut stream);
    };
    let reserved_flags: fn(UnixStream) = |mut stream| {
        introduce(&mut stream);
        let _ = stream.write_all(&[0xf0; 16]);
        is_ended(&mut stream);
    };
    let acts = [
        no_zmtp,
        a_dealer,
        an_answer_before_ready,
        too_much,
        reserved_flags,
    ];
    for act in acts {
        let folder = folder();
        let (mut connections, acting) = impostor(&folder, act);
        connections.send(&lookup(1, "r", 1), &[0]);
        assert_eq!(receive(&mut connections, 1), [(0, Event::Lost)]);
        drop(connections);
        acting.join().expect("it did as told");
    }
}

#[test]
fn a_server_that_reads_nothing_is_sent_no_more_than_fits_and_releases_still_go() {
    let folder = folder();
    let path = folder.path().join("deaf");
    // Connections are taken in by the system; nobody accepts them.
    let _listener = UnixListener::bind(&path).expect("a fresh path");
    let mut connections = connections([path.as_path()]);
    assert!(connections.connect());
    let mut message_id = 0;
    let mut num_sent = 0;
    while connections.send(&lookup(message_id, "r", 60_000), &[0]) {
        message_id += 1;
        num_sent += 1;
        assert!(num_sent < 100, "it takes in without end");
    }
    assert!(num_sent >= 4);
    assert!(connections.post(&wire::encode_release(99, "r")).is_empty());
    assert_eq!(connections.receive(Duration::from_micros(200)), []);
}

// --- peers of the same user that mean no good -----------------------------------------------------

#[test]
fn who_does_not_know_the_secret_is_turned_away() {
    let folder = folder();
    let rank = rank(&folder, "0");
    for identity in [&b""[..], b"guess", &SECRET[1..], &[b'0'; 64]] {
        let mut stranger = UnixStream::connect(&rank.path).expect("the server listens");
        let introduction = [&greeting()[..], &ready(identity)].concat();
        stranger.write_all(&introduction).expect("the server reads");
        let _ = stranger.write_all(&frame(&lookup(1, "theirs", 4)));
        assert!(is_ended(&mut stranger));
    }
    wait_for(&rank.server, |stats| stats.strangers == 4);
    assert_eq!(rank.server.stats().lookups, 0);
    assert!(rank.index.leases().is_empty());
}

#[test]
fn strangers_that_keep_every_place_busy_do_not_lock_the_engine_out() {
    let folder = folder();
    let rank = rank(&folder, "0");
    let introduction = [&greeting()[..], &ready(b"guess")].concat();
    let stranger = || UnixStream::connect(&rank.path).expect("the server listens");
    let mut silent = Vec::new();
    // Each of the engine's questions comes over a new connection, behind as many strangers as there are
    // places: some say nothing and stay, some introduce themselves.
    for _ in 0..5 {
        silent.extend((0..70).map(|_| stranger()));
        let mut loud: Vec<_> = (0..20).map(|_| stranger()).collect();
        for stranger in &mut loud {
            let _ = stranger.write_all(&introduction);
        }
        let mut connections = connections([rank.path.as_path()]);
        while !connections.connect() {
            // The system takes in only so many at a time.
            thread::sleep(Duration::from_millis(1));
        }
        assert!(connections.send(&lookup(1, "ours", 4), &[0]));
        assert_eq!(receive(&mut connections, 1), [answered(0, 1, 4)]);
    }
    wait_for(&rank.server, |stats| stats.strangers == 100);
    let turned_away = rank.server.stats().refused_connections;
    assert!(turned_away >= 5 * 70 - 64, "{turned_away}");
}

#[test]
fn what_an_older_connection_left_unread_touches_no_lease_of_the_newer_one() {
    let folder = folder();
    let rank = rank(&folder, "0");
    let shut = rank.index.gate.lock().expect("no panic inside");
    // As after a restart of the asking side: its last words are still on their way.
    let mut older = UnixStream::connect(&rank.path).expect("the server listens");
    let mut words = [&greeting()[..], &ready(SECRET)].concat();
    words.extend(frame(&lookup(1, "wait", 1)));
    for message_id in 2..500 {
        words.extend(frame(&wire::encode_release(message_id, "r")));
        words.extend(frame(&lookup(1_000 + message_id, "forgotten", 2)));
    }
    older.write_all(&words).expect("it fits");
    wait_for(&rank.server, |stats| stats.connections == 1);
    let mut newer = connections([rank.path.as_path()]);
    assert!(newer.connect());
    assert!(newer.send(&lookup(1, "r", 4), &[0]));
    newer.receive(Duration::ZERO);
    drop(shut);
    assert_eq!(receive(&mut newer, 1), [answered(0, 1, 4)]);
    assert!(is_ended(&mut older));
    wait_for(&rank.server, |stats| stats.superseded_connections == 1);
    assert_eq!(rank.index.leases().get("r"), Some(&4));
    assert!(
        rank.server.stats().releases < 498,
        "it was heard to its end"
    );
}
