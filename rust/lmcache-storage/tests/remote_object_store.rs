//! The remote tier over HTTP as object stores speak it, with a server that says what a test wants. A real one is asked
//! in `tests/conformance`.
#![cfg(feature = "object-store")]

mod remote_memory;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lmcache_storage::remote::{Options, RemoteTier, Serde, connect};
use parking_lot::Mutex;

use remote_memory::{chain, chunks, filled, pool, wait_until};

const WITHIN: Duration = Duration::from_secs(30);
const DEADLINE: Duration = Duration::from_secs(3);

/// What the server does, whatever is asked.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mood {
    Well,
    Says(u16, &'static str),
    /// To puts alone.
    RefusesPuts(u16, &'static str),
    /// No HTTP.
    Babbles,
    /// Never an answer.
    Mute,
    /// Half of each body, then the connection's end.
    Cuts,
    /// Objects get shorter, and it says so.
    Truncates,
}

#[derive(Debug)]
struct Server {
    port: u16,
    objects: Mutex<BTreeMap<String, Vec<u8>>>,
    mood: Mutex<Mood>,
    heads: AtomicUsize,
    gets: AtomicUsize,
}

impl Server {
    fn start() -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let server = Arc::new(Self {
            port: listener.local_addr().expect("bound").port(),
            objects: Mutex::default(),
            mood: Mutex::new(Mood::Well),
            heads: AtomicUsize::new(0),
            gets: AtomicUsize::new(0),
        });
        let serving = Arc::clone(&server);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                stream.set_nodelay(true).expect("a socket");
                let server = Arc::clone(&serving);
                std::thread::spawn(move || server.serve(&stream));
            }
        });
        server
    }

    fn serve(&self, stream: &TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream);
        let mut writer = stream;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
            let mut words = line.split(' ');
            let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
            let (mut length, mut range) = (0, None);
            loop {
                let mut header = String::new();
                reader.read_line(&mut header).ok()?;
                let header = header.trim().to_ascii_lowercase();
                if let Some(value) = header.strip_prefix("content-length: ") {
                    length = value.parse().ok()?;
                } else if let Some(value) = header.strip_prefix("range: bytes=0-") {
                    range = Some(value.parse::<usize>().ok()? + 1);
                } else if header.is_empty() {
                    break;
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).ok()?;
            let mood = *self.mood.lock();
            match mood {
                Mood::Babbles => {
                    writer.write_all(b"220 mail.example ESMTP\r\n").ok()?;
                    return None;
                }
                Mood::Mute => {
                    std::thread::sleep(WITHIN);
                    return None;
                }
                _ => {}
            }
            let (status, code) = match mood {
                Mood::Says(status, code) => (status, code),
                Mood::RefusesPuts(status, code) if method == "PUT" => (status, code),
                _ => (200, ""),
            };
            if status != 200 {
                let body = format!("<Error><Code>{code}</Code><Message>SECRET</Message></Error>");
                reply(&mut writer, status, &method, body.as_bytes(), None)?;
                continue;
            }
            let name = path.strip_prefix("/kv/").unwrap_or_default().to_owned();
            let (status, mut answer) = self.answer(&method, &name, &path, body);
            let mut sent = None;
            if status == 200 && method == "GET" {
                if let Some(range) = range {
                    answer.truncate(range);
                }
                match mood {
                    Mood::Cuts => sent = Some(answer.len() / 2),
                    Mood::Truncates => answer.truncate(answer.len() / 2),
                    _ => {}
                }
            }
            let status = if range.is_some() && status == 200 {
                206
            } else {
                status
            };
            reply(&mut writer, status, &method, &answer, sent)?;
            if sent.is_some() {
                return None;
            }
        }
    }

    fn answer(&self, method: &str, name: &str, path: &str, body: Vec<u8>) -> (u16, Vec<u8>) {
        let mut objects = self.objects.lock();
        match method {
            "PUT" => {
                objects.insert(name.to_owned(), body);
                (200, Vec::new())
            }
            "POST" => {
                let asked = String::from_utf8(body).expect("XML");
                let keys = asked.split("<Key>").skip(1);
                let keys = keys.filter_map(|rest| rest.split("</Key>").next());
                let mut told = String::new();
                for key in keys {
                    objects.remove(key);
                    told += &format!("<Deleted><Key>{key}</Key></Deleted>");
                }
                (
                    200,
                    format!("<DeleteResult>{told}</DeleteResult>").into_bytes(),
                )
            }
            "GET" if path.contains("list-type=2") => {
                let listed =
                    "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>";
                (200, listed.as_bytes().to_vec())
            }
            _ => {
                let counted = if method == "HEAD" {
                    &self.heads
                } else {
                    &self.gets
                };
                counted.fetch_add(1, Ordering::Relaxed);
                match objects.get(name) {
                    Some(object) => (200, object.clone()),
                    None => (404, b"<Error><Code>NoSuchKey</Code></Error>".to_vec()),
                }
            }
        }
    }

    fn set(&self, mood: Mood) {
        *self.mood.lock() = mood;
    }

    fn tier(&self, serde: Serde) -> RemoteTier {
        let url = format!(
            "s3://kv/team?endpoint=http://127.0.0.1:{}&signature=none",
            self.port
        );
        let found = connect(&url, 8, &BTreeMap::new()).expect("a right URL");
        let options = Options {
            key_prefix: found.key_prefix,
            deadline: DEADLINE,
            serde,
            ..Options::default()
        };
        RemoteTier::open(found.client, options, pool(256)).expect("two threads")
    }
}

fn reply(
    writer: &mut &TcpStream,
    status: u16,
    method: &str,
    body: &[u8],
    sent: Option<usize>,
) -> Option<()> {
    let range = match status {
        206 => format!(
            "Content-Range: bytes 0-{}/{}\r\n",
            body.len() - 1,
            body.len()
        ),
        _ => String::new(),
    };
    let head = format!(
        "HTTP/1.1 {status} x\r\nContent-Length: {}\r\nETag: \"e\"\r\n\
         Last-Modified: Mon, 30 Nov 2026 08:00:00 GMT\r\n{range}\r\n",
        body.len()
    );
    writer.write_all(head.as_bytes()).ok()?;
    if method != "HEAD" {
        writer.write_all(&body[..sent.unwrap_or(body.len())]).ok()?;
    }
    Some(())
}

fn faults(tier: &RemoteTier) -> BTreeMap<String, u64> {
    let stats = tier.stats().into_iter();
    stats
        .filter_map(|(name, count)| Some((name.strip_prefix("faults_")?.to_owned(), count)))
        .collect()
}

#[test]
fn chunks_come_back_packed_or_not_and_never_from_one_another() {
    let server = Server::start();
    let hashes = chain(1..20);
    let ids: Vec<u8> = (1..20).collect();
    for (serde, others) in [
        (Serde::Naive, Serde::Lossless),
        (Serde::Lossless, Serde::Naive),
    ] {
        server.objects.lock().clear();
        let tier = server.tier(serde);
        assert_eq!(tier.put("model=m", &hashes, chunks(&hashes)), 19);
        assert!(tier.flush(WITHIN));
        assert_eq!(tier.contains_prefix("model=m", &hashes), 19);
        assert_eq!(filled(tier.get("model=m", &hashes, WITHIN)), ids);
        assert_eq!(server.tier(others).contains_prefix("model=m", &hashes), 0);
        let stats = tier.stats();
        let is_packed = stats["sent_bytes"] < stats["put_bytes"] + 19 * 4096;
        assert_eq!(is_packed, serde == Serde::Lossless, "{stats:?}");
        // Read as what they are, and not by who wrote them.
        let tier = server.tier(serde);
        assert_eq!(filled(tier.get("model=m", &hashes, WITHIN)), ids);
        assert!(tier.remove("model=m", hashes[3]));
        assert!(!tier.remove("model=m", hashes[3]));
        assert_eq!(tier.contains_prefix("model=m", &hashes), 3);
        assert_eq!(faults(&tier), BTreeMap::new());
    }
}

#[test]
fn questions_go_out_together_and_are_not_asked_again_at_once() {
    let server = Server::start();
    let hashes = chain(1..=200);
    let tier = server.tier(Serde::Naive);
    tier.put("model=m", &hashes, chunks(&hashes));
    assert!(tier.flush(WITHIN));
    let asked = server.heads.swap(0, Ordering::Relaxed);
    assert!(
        asked <= 4,
        "{asked} questions before puts of nothing that is there"
    );
    // All were put a moment ago.
    assert_eq!(tier.contains_prefix("model=m", &hashes), 200);
    assert_eq!(server.heads.swap(0, Ordering::Relaxed), 0);
    let other = server.tier(Serde::Naive);
    assert_eq!(other.contains_prefix("model=m", &hashes), 200);
    assert_eq!(server.heads.swap(0, Ordering::Relaxed), 200);
    assert_eq!(other.contains_prefix("model=m", &hashes), 200);
    assert_eq!(server.heads.swap(0, Ordering::Relaxed), 0);
    assert_eq!(other.contains_prefix("model=n", &hashes), 0);
    assert_eq!(server.heads.swap(0, Ordering::Relaxed), 4);
}

#[test]
fn what_others_removed_is_a_miss_from_the_first_load_on_and_is_stored_anew() {
    let server = Server::start();
    let hashes = chain(1..4);
    let tier = server.tier(Serde::Naive);
    tier.put("model=m", &hashes, chunks(&hashes));
    assert!(tier.flush(WITHIN));
    server.objects.lock().clear();
    // Hinted, and only that.
    assert_eq!(tier.contains_prefix("model=m", &hashes), 3);
    assert!(tier.get("model=m", &hashes, WITHIN).is_empty());
    assert_eq!(tier.contains_prefix("model=m", &hashes), 0);
    assert_eq!(tier.put("model=m", &hashes, chunks(&hashes)), 3);
    assert!(tier.flush(WITHIN));
    assert_eq!(filled(tier.get("model=m", &hashes, WITHIN)), [1, 2, 3]);
    assert_eq!(server.objects.lock().len(), 3);
    assert_eq!(faults(&tier), BTreeMap::new());
}

#[test]
fn every_answer_that_is_none_is_a_miss_of_its_kind_within_the_deadline() {
    for (mood, kind) in [
        (Mood::Says(403, "AccessDenied"), "denied"),
        (Mood::Says(401, "InvalidToken"), "denied"),
        (Mood::Says(500, "InternalError"), "server"),
        (Mood::Says(503, "SlowDown"), "server"),
        (Mood::Babbles, "protocol"),
        (Mood::Mute, "timeout"),
        (Mood::Cuts, "unreachable"),
        (Mood::Truncates, "truncated"),
    ] {
        let server = Server::start();
        let tier = server.tier(Serde::Naive);
        let hashes = chain(1..4);
        tier.put("model=m", &hashes, chunks(&hashes));
        assert!(tier.flush(WITHIN));
        server.set(mood);
        let began = Instant::now();
        assert!(tier.get("model=m", &hashes, WITHIN).is_empty(), "{mood:?}");
        let took = began.elapsed();
        assert!(
            took < DEADLINE + Duration::from_secs(20),
            "{mood:?}: {took:?}"
        );
        let counted = faults(&tier);
        assert!(counted.contains_key(kind), "{mood:?}: {counted:?}");
        for line in tier.take_lines() {
            assert!(!line.contains("SECRET"), "{line}");
        }
        // Well again: used again, without anybody's help.
        server.set(Mood::Well);
        server.objects.lock().clear();
        wait_until("the tier is used again", || {
            tier.put("model=m", &hashes, chunks(&hashes));
            assert!(tier.flush(WITHIN));
            filled(tier.get("model=m", &hashes, WITHIN)) == [1, 2, 3]
        });
    }
}

#[test]
fn a_store_that_takes_no_puts_is_read_all_the_same() {
    let server = Server::start();
    let tier = server.tier(Serde::Naive);
    let (hashes, others) = (chain(1..4), chain(4..8));
    tier.put("model=m", &hashes, chunks(&hashes));
    assert!(tier.flush(WITHIN));
    for (mood, kind) in [
        (Mood::RefusesPuts(403, "AccessDenied"), "denied"),
        (Mood::RefusesPuts(507, "XMinioStorageFull"), "full"),
        (Mood::RefusesPuts(404, "NoSuchBucket"), "denied"),
    ] {
        server.set(mood);
        wait_until("a put was refused", || {
            tier.put("model=m", &others, chunks(&others));
            assert!(tier.flush(WITHIN));
            faults(&tier).contains_key(kind)
        });
        assert_eq!(tier.contains_prefix("model=m", &others), 0);
        assert_eq!(filled(tier.get("model=m", &hashes, WITHIN)), [1, 2, 3]);
    }
}

#[test]
fn nobody_there_is_a_miss_and_health_says_so() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("bound").port();
    drop(listener);
    let url = format!("s3://kv?endpoint=http://127.0.0.1:{port}&signature=none");
    let found = connect(&url, 8, &BTreeMap::new()).expect("a right URL");
    let tier = RemoteTier::open(found.client, Options::default(), pool(16)).expect("two threads");
    assert_eq!(tier.contains_prefix("model=m", &chain(1..4)), 0);
    let findings = tier.health(WITHIN);
    assert!(!findings[0].ok, "{findings:?}");
    assert!(findings[0].words.contains("unreachable"), "{findings:?}");
    assert!(connect("s3://kv?endpoint=ftp://h", 8, &BTreeMap::new()).is_err());
    assert!(
        connect("ftp://kv", 8, &BTreeMap::new())
            .expect_err("unknown")
            .contains("s3")
    );
}

#[test]
fn health_tells_rights_and_that_nothing_leaves_by_itself() {
    let server = Server::start();
    let tier = server.tier(Serde::Naive);
    let findings = tier.health(WITHIN);
    assert!(findings.iter().all(|found| found.ok), "{findings:?}");
    assert!(
        findings
            .iter()
            .any(|found| found.words.contains("lifecycle"))
    );
    assert!(server.objects.lock().is_empty());
    server.set(Mood::RefusesPuts(403, "AccessDenied"));
    let findings = tier.health(WITHIN);
    let rights = findings.iter().find(|found| found.what == "rights");
    let rights = rights.expect("it was looked at");
    assert!(!rights.ok);
    assert!(rights.words.contains("PutObject"), "{rights:?}");
}
