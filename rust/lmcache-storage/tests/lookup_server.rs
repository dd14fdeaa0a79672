//! The server against a real ZeroMQ client and against peers that mean no good.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lmcache_core::hash::ChunkHash;
use lmcache_storage::lookup_server::{
    LookupAnswer, LookupIndex, LookupServer, LookupServerError, LookupServerStats,
};
use lmcache_storage::wire::{self, Answer, Status};
use tempfile::TempDir;
use zeromq::{DealerSocket, ReqSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// Chunks whose first byte is below 100 are stored; a lookup for `panic` panics.
#[derive(Default)]
struct Double {
    leases: Mutex<HashMap<String, u32>>,
    lookups: AtomicU64,
    clears: AtomicU64,
}

impl LookupIndex for Double {
    fn lookup(&self, lookup_id: &str, namespace: &str, hashes: &[ChunkHash]) -> LookupAnswer {
        self.lookups.fetch_add(1, Ordering::Relaxed);
        assert_ne!(namespace, "panic", "asked to panic");
        let hits = hashes.iter().take_while(|hash| hash.0[0] < 100).count() as u32;
        self.leases
            .lock()
            .expect("no panic inside")
            .insert(lookup_id.into(), hits);
        LookupAnswer {
            hit_chunks: hits,
            lease_ms: if hits > 0 { 5_000 } else { 0 },
        }
    }

    fn release(&self, lookup_id: &str) {
        self.leases
            .lock()
            .expect("no panic inside")
            .remove(lookup_id);
    }

    fn clear(&self) {
        self.clears.fetch_add(1, Ordering::Relaxed);
    }
}

struct Room {
    server: LookupServer,
    index: Arc<Double>,
    path: PathBuf,
    _folder: TempDir,
}

fn room() -> Room {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("lookup/0.sock");
    let index = Arc::new(Double::default());
    let server =
        LookupServer::start(&path, Arc::<Double>::clone(&index), b"").expect("a fresh path");
    Room {
        server,
        index,
        path,
        _folder: folder,
    }
}

fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let deadline = Duration::from_secs(20);
    runtime
        .expect("an event loop")
        .block_on(async { tokio::time::timeout(deadline, future).await })
        .expect("answers come in time")
}

async fn dealer(path: &Path) -> DealerSocket {
    let mut dealer = DealerSocket::new();
    dealer
        .connect(&format!("ipc://{}", path.display()))
        .await
        .expect("the server greets");
    dealer
}

async fn send(dealer: &mut DealerSocket, message: Vec<u8>) {
    dealer.send(message.into()).await.expect("it is connected");
}

async fn receive(dealer: &mut DealerSocket) -> Answer {
    let message = dealer.recv().await.expect("it is connected").into_vec();
    assert_eq!(message.len(), 1, "an answer is one frame");
    wire::decode_answer(&message[0]).expect("a good answer")
}

/// An open connection past its handshake, for bytes no decent client would send.
fn raw_peer(path: &Path) -> UnixStream {
    let mut peer = UnixStream::connect(path).expect("the server listens");
    peer.set_read_timeout(Some(Duration::from_secs(10)))
        .expect("a timeout");
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    peer.write_all(&greeting).expect("the server reads");
    peer.write_all(b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER")
        .expect("the server reads");
    let mut welcome = [0; 64 + 30];
    peer.read_exact(&mut welcome).expect("greeting and READY");
    assert!(welcome.ends_with(b"ROUTER"));
    peer
}

/// Whether the server ended the connection.
fn is_ended(peer: &mut UnixStream) -> bool {
    !matches!(peer.read(&mut [0; 64]), Ok(1..) | Err(_))
}

/// Waits until the counters say so.
fn wait_for(room: &Room, what: impl Fn(&LookupServerStats) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !what(&room.server.stats()) {
        assert!(Instant::now() < deadline, "{:?}", room.server.stats());
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn assert_alive(room: &Room) {
    run(async {
        let mut dealer = dealer(&room.path).await;
        send(&mut dealer, wire::encode_ping(1)).await;
        assert_eq!(receive(&mut dealer).await.status, Status::Ok);
    });
}

fn packed(ids: impl IntoIterator<Item = u8>) -> Vec<u8> {
    ids.into_iter().flat_map(|id| [id; 32]).collect()
}

#[test]
fn a_lookup_is_answered_with_its_prefix_and_its_lease() {
    let room = room();
    run(async {
        let mut dealer = dealer(&room.path).await;
        send(
            &mut dealer,
            wire::encode_lookup(7, "r1", "ns", &packed([1, 2, 200, 3])),
        )
        .await;
        let expected = Answer {
            message_id: 7,
            status: Status::Ok,
            hit_chunks: 2,
            lease_ms: 5_000,
        };
        assert_eq!(receive(&mut dealer).await, expected);
    });
}

#[test]
fn a_long_lookup_arrives_whole() {
    let room = room();
    run(async {
        let mut dealer = dealer(&room.path).await;
        let hashes = packed((0..60_000).map(|i| (i % 100) as u8));
        send(&mut dealer, wire::encode_lookup(1, "r1", "ns", &hashes)).await;
        assert_eq!(receive(&mut dealer).await.hit_chunks, 60_000);
    });
}

#[test]
fn a_release_has_no_answer_and_ends_the_lease() {
    let room = room();
    run(async {
        let mut dealer = dealer(&room.path).await;
        send(
            &mut dealer,
            wire::encode_lookup(1, "r1", "ns", &packed([1])),
        )
        .await;
        receive(&mut dealer).await;
        send(&mut dealer, wire::encode_release(2, "r1")).await;
        send(&mut dealer, wire::encode_ping(3)).await;
        assert_eq!(receive(&mut dealer).await.message_id, 3);
    });
    assert!(
        room.index
            .leases
            .lock()
            .expect("no panic inside")
            .is_empty()
    );
}

#[test]
fn a_clear_is_answered_when_it_is_done() {
    let room = room();
    run(async {
        let mut dealer = dealer(&room.path).await;
        send(&mut dealer, wire::encode_clear(1)).await;
        let done = Answer {
            message_id: 1,
            status: Status::Ok,
            hit_chunks: 0,
            lease_ms: 0,
        };
        assert_eq!(receive(&mut dealer).await, done);
        assert_eq!(room.index.clears.load(Ordering::Relaxed), 1);
    });
    assert_eq!(room.server.stats().clears, 1);
}

#[test]
fn many_asks_at_once_are_answered_in_order() {
    let room = room();
    run(async {
        let mut dealer = dealer(&room.path).await;
        for message_id in 1..=2_000 {
            send(
                &mut dealer,
                wire::encode_lookup(message_id, "r", "ns", &packed([1; 8])),
            )
            .await;
        }
        for message_id in 1..=2_000 {
            assert_eq!(receive(&mut dealer).await.message_id, message_id);
        }
    });
    assert_eq!(room.server.stats().lookups, 2_000);
}

#[test]
fn bad_messages_are_answered_counted_and_survived() {
    let room = room();
    run(async {
        let mut dealer = dealer(&room.path).await;
        let mut cut = wire::encode_lookup(5, "r1", "ns", &packed([1]));
        cut.truncate(40);
        let mut foreign = wire::encode_ping(6);
        foreign[1] = 2;
        let mut kind = wire::encode_ping(7);
        kind[3] = 99;
        let noise = b"\xff\x00noise".to_vec();
        for message in [noise, cut, foreign, kind, vec![]] {
            send(&mut dealer, message).await;
        }
        let mut refused = Vec::new();
        for _ in 0..5 {
            let answer = receive(&mut dealer).await;
            assert_eq!((answer.hit_chunks, answer.lease_ms), (0, 0));
            refused.push((answer.message_id, answer.status));
        }
        let expected = [
            (0, Status::Malformed),
            (5, Status::Malformed),
            (6, Status::ForeignVersion),
            (7, Status::UnknownKind),
            (0, Status::Malformed),
        ];
        assert_eq!(refused, expected);
        send(&mut dealer, wire::encode_ping(8)).await;
        assert_eq!(receive(&mut dealer).await.status, Status::Ok);
    });
    let stats = room.server.stats();
    assert_eq!(
        (stats.malformed, stats.foreign_version, stats.unknown_kind),
        (3, 1, 1)
    );
    assert_eq!(room.index.lookups.load(Ordering::Relaxed), 0);
}

#[test]
fn a_replayed_message_is_refused_and_takes_no_lease() {
    let room = room();
    run(async {
        let mut dealer = dealer(&room.path).await;
        let lookup = wire::encode_lookup(4, "r1", "ns", &packed([1]));
        send(&mut dealer, lookup.clone()).await;
        send(&mut dealer, wire::encode_release(5, "r1")).await;
        send(&mut dealer, lookup).await;
        assert_eq!(receive(&mut dealer).await.status, Status::Ok);
        assert_eq!(receive(&mut dealer).await.status, Status::Replayed);
    });
    assert_eq!(room.server.stats().replayed, 1);
    assert!(
        room.index
            .leases
            .lock()
            .expect("no panic inside")
            .is_empty()
    );
}

#[test]
fn a_message_of_several_frames_is_refused_once() {
    let room = room();
    run(async {
        let mut dealer = dealer(&room.path).await;
        let mut parts = ZmqMessage::from(vec![]);
        parts.push_back(wire::encode_ping(1).into());
        parts.push_back(wire::encode_ping(1).into());
        dealer.send(parts).await.expect("it is connected");
        send(&mut dealer, wire::encode_ping(2)).await;
        let refused = receive(&mut dealer).await;
        assert_eq!((refused.message_id, refused.status), (0, Status::Malformed));
        let answer = receive(&mut dealer).await;
        assert_eq!((answer.message_id, answer.status), (2, Status::Ok));
    });
}

#[test]
fn a_panic_of_the_index_is_an_answer() {
    let room = room();
    run(async {
        let mut dealer = dealer(&room.path).await;
        send(
            &mut dealer,
            wire::encode_lookup(1, "r1", "panic", &packed([1])),
        )
        .await;
        assert_eq!(receive(&mut dealer).await.status, Status::Failed);
        send(
            &mut dealer,
            wire::encode_lookup(2, "r1", "ns", &packed([1])),
        )
        .await;
        assert_eq!(receive(&mut dealer).await.status, Status::Ok);
    });
    assert_eq!(room.server.stats().index_failures, 1);
}

#[test]
fn a_frame_above_the_limit_ends_only_its_own_connection() {
    let room = room();
    for num_bytes in [wire::MAX_MESSAGE_BYTES as u64 + 1, 1 << 50, u64::MAX] {
        let mut peer = raw_peer(&room.path);
        peer.write_all(&[2]).expect("it is connected");
        peer.write_all(&num_bytes.to_be_bytes())
            .expect("it is connected");
        assert!(is_ended(&mut peer));
    }
    assert_eq!(room.server.stats().oversized, 3);
    assert_alive(&room);
}

#[test]
fn a_message_of_exactly_the_limit_is_read() {
    let room = room();
    run(async {
        let mut dealer = dealer(&room.path).await;
        send(&mut dealer, vec![0xc1; wire::MAX_MESSAGE_BYTES]).await;
        assert_eq!(receive(&mut dealer).await.status, Status::Malformed);
    });
}

#[test]
fn bytes_that_are_not_zmtp_end_only_their_own_connection() {
    let room = room();
    let mut stranger = UnixStream::connect(&room.path).expect("the server listens");
    stranger
        .set_read_timeout(Some(Duration::from_secs(10)))
        .expect("a timeout");
    stranger.write_all(&[b'G'; 200]).expect("the server reads");
    let mut rest = Vec::new();
    let _ = stranger.read_to_end(&mut rest);
    assert_eq!(rest.len(), 64, "nothing but a greeting");
    let mut peer = raw_peer(&room.path);
    peer.write_all(&[0xf0; 16]).expect("it is connected");
    assert!(is_ended(&mut peer));
    wait_for(&room, |stats| {
        stats.broken_connections == 1 && stats.refused_connections == 1
    });
    assert_alive(&room);
}

#[test]
fn a_message_cut_short_by_the_end_of_its_sender_is_forgotten() {
    let room = room();
    let mut peer = raw_peer(&room.path);
    peer.write_all(b"\x00\xff\x96").expect("it is connected");
    drop(peer);
    assert_alive(&room);
    assert_eq!(room.index.lookups.load(Ordering::Relaxed), 0);
}

#[test]
fn a_peer_that_reads_no_answers_holds_up_nobody_else() {
    let room = room();
    let mut deaf = raw_peer(&room.path);
    deaf.set_write_timeout(Some(Duration::from_millis(300)))
        .expect("a timeout");
    let mut message_id = 0;
    let mut batch = Vec::new();
    let sent = loop {
        batch.clear();
        for _ in 0..1_000 {
            message_id += 1;
            let ping = wire::encode_ping(message_id);
            batch.extend([0, ping.len() as u8]);
            batch.extend(ping);
        }
        if deaf.write_all(&batch).is_err() {
            break message_id;
        }
        assert!(message_id < 10_000_000, "the server takes in without end");
    };
    assert!(room.server.stats().pings < sent);
    assert_alive(&room);
}

#[test]
fn connections_beyond_the_limit_are_closed_until_others_end() {
    let room = room();
    let peers: Vec<_> = (0..64).map(|_| raw_peer(&room.path)).collect();
    let mut refused = UnixStream::connect(&room.path).expect("the server listens");
    assert!(is_ended(&mut refused));
    drop(peers);
    std::thread::sleep(Duration::from_millis(100));
    assert_alive(&room);
}

#[test]
fn idle_connections_at_the_limit_make_way() {
    let room = room();
    let mut peers: Vec<_> = (0..64).map(|_| raw_peer(&room.path)).collect();
    std::thread::sleep(Duration::from_millis(1_200));
    assert_alive(&room);
    let ended = |peer: &mut UnixStream| {
        peer.set_nonblocking(true).expect("a socket");
        matches!(peer.read(&mut [0; 64]), Ok(0))
    };
    assert_eq!(
        peers
            .iter_mut()
            .filter_map(|peer| ended(peer).then_some(()))
            .count(),
        1
    );
}

#[test]
fn ids_and_namespaces_beyond_the_limit_are_malformed() {
    let room = room();
    run(async {
        let mut dealer = dealer(&room.path).await;
        let (id, namespace) = ("i".repeat(512), "n".repeat(16 << 10));
        let requests = [
            wire::encode_lookup(1, &id, &namespace, &packed([1])),
            wire::encode_lookup(2, &format!("{id}i"), "ns", &packed([1])),
            wire::encode_lookup(3, "r", &format!("{namespace}n"), &packed([1])),
            wire::encode_release(4, &format!("{id}i")),
        ];
        for request in requests {
            send(&mut dealer, request).await;
        }
        let expected = [
            Status::Ok,
            Status::Malformed,
            Status::Malformed,
            Status::Malformed,
        ];
        for status in expected {
            assert_eq!(receive(&mut dealer).await.status, status);
        }
    });
    assert_eq!(room.index.leases.lock().expect("no panic inside").len(), 1);
}

#[test]
fn only_dealers_are_served() {
    let room = room();
    run(async {
        let mut req = ReqSocket::new();
        let address = format!("ipc://{}", room.path.display());
        let refused = req.connect(&address).await;
        assert!(refused.is_err());
    });
}

#[test]
fn a_second_server_at_a_live_path_is_refused() {
    let room = room();
    let second = LookupServer::start(&room.path, Arc::new(Double::default()), b"");
    assert!(matches!(second, Err(LookupServerError::InUse { .. })));
    assert_alive(&room);
}

#[test]
fn closing_twice_leaves_nothing_behind_and_the_path_free() {
    let room = room();
    let peer = raw_peer(&room.path);
    room.server.close();
    room.server.close();
    assert!(!room.path.exists());
    assert!(is_ended(&mut peer.try_clone().expect("a descriptor")));
    let second =
        LookupServer::start(&room.path, Arc::new(Double::default()), b"").expect("a free path");
    drop(second);
    let folder = room.path.parent().expect("a folder");
    assert_eq!(folder.read_dir().expect("it stays").count(), 0);
}
