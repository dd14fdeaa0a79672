//! Large values over a plain socket: sent from where they lie, and received where they stay. The driver copies
//! each of them several times, which costs more than the network where that is fast.
//!
//! One command and one answer at a time; anything but what these commands answer is an error of the protocol.

use std::io;
use std::pin::Pin;
use std::time::Duration;

use bytes::{BufMut as _, Bytes};
use redis::io::tcp::socket2::SockRef;
use redis::{ConnectionAddr, ConnectionInfo};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

use super::address::CONNECT_WITHIN;
use super::refusals::{refusal, refusal_of_credentials};
use crate::remote::client::Refusal;
use crate::remote::landing::Landing;

/// Pieces up to this size are sent together with what is before them.
const SMALL_BYTES: usize = 64 << 10;
/// An answer's first line has no more.
const MAX_LINE: usize = 4096;
/// How long a connection that broke is asked why.
const LAST_WORDS_WITHIN: Duration = Duration::from_millis(100);

trait Socket: AsyncRead + AsyncWrite + Send {}
impl<T: AsyncRead + AsyncWrite + Send> Socket for T {}

/// One connection.
pub(super) struct Wire {
    socket: Pin<Box<dyn Socket>>,
    /// Whether nothing more is to be asked: an answer was left unread.
    pub(super) is_spent: bool,
    /// Whether what is asked holds credentials.
    is_secret: bool,
}

/// What a command is answered by.
#[derive(Debug, PartialEq)]
pub(super) enum Reply {
    /// `OK`, or another word.
    Word(String),
    /// So many bytes, or nothing.
    Bulk(Option<usize>),
}

/// Where the bytes of an answer go.
pub(super) enum Destination<'a> {
    /// There are none in it.
    Nothing,
    /// All of them here, and no more than so many.
    Memory(&'a mut Vec<u8>, u64),
    /// A value.
    Landing(&'a mut Landing),
}

impl Destination<'_> {
    /// The most bytes that may come.
    fn most(&self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Memory(_, most) => *most,
            // One more than is taken tells that it is too large.
            Self::Landing(landing) => landing.max_bytes().saturating_add(1),
        }
    }

    pub(super) fn again(&mut self) -> Destination<'_> {
        match self {
            Self::Nothing => Destination::Nothing,
            Self::Memory(memory, most) => Destination::Memory(memory, *most),
            Self::Landing(landing) => Destination::Landing(landing),
        }
    }
}

/// Why there is no reply.
pub(super) enum Failure {
    /// The connection broke: a fresh one may fare better.
    Broken(io::Error),
    /// Any other reason; the connection is good only if it is an error that the server reports.
    Refused { refusal: Refusal, is_sound: bool },
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Broken(error)
    }
}

impl Failure {
    fn protocol(found: impl Into<String>) -> Self {
        Self::Refused {
            refusal: Refusal::Protocol(found.into()),
            is_sound: false,
        }
    }

    pub(super) fn into_refusal(self) -> Refusal {
        match self {
            Self::Broken(error) => Refusal::Unreachable(error.to_string()),
            Self::Refused { refusal, .. } => refusal,
        }
    }
}

impl Wire {
    pub(super) async fn open(info: &ConnectionInfo) -> Result<Self, Refusal> {
        let opened = timeout(CONNECT_WITHIN, Self::greet(info)).await;
        match opened {
            Ok(outcome) => outcome.map_err(Failure::into_refusal),
            Err(_) => Err(Refusal::Unreachable(format!(
                "no connection within {CONNECT_WITHIN:?}"
            ))),
        }
    }

    async fn greet(info: &ConnectionInfo) -> Result<Self, Failure> {
        let socket: Pin<Box<dyn Socket>> = match info.addr() {
            ConnectionAddr::Tcp(host, port) => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                stream.set_nodelay(true)?;
                let (settings, socket) = (info.tcp_settings(), SockRef::from(&stream));
                if let Some(keepalive) = settings.keepalive() {
                    socket.set_tcp_keepalive(keepalive)?;
                }
                socket.set_tcp_user_timeout(settings.user_timeout())?;
                Box::pin(stream)
            }
            ConnectionAddr::Unix(path) => Box::pin(UnixStream::connect(path).await?),
            _ => return Err(Failure::protocol("it is no plain socket")),
        };
        let mut wire = Self {
            socket,
            is_spent: false,
            is_secret: true,
        };
        let settings = info.redis_settings();
        if let Some(password) = settings.password() {
            let mut command = vec![Bytes::from_static(b"AUTH")];
            let username = settings.username().map(str::to_owned);
            command.extend(username.map(Bytes::from));
            command.push(Bytes::from(password.to_owned()));
            wire.ask(&command).await?;
        }
        wire.is_secret = false;
        if settings.db() != 0 {
            let db = Bytes::from(settings.db().to_string());
            wire.ask(&[Bytes::from_static(b"SELECT"), db]).await?;
        }
        Ok(wire)
    }

    /// One command of whole arguments.
    async fn ask(&mut self, arguments: &[Bytes]) -> Result<Reply, Failure> {
        let split: Vec<Vec<Bytes>> = arguments.iter().map(|each| vec![each.clone()]).collect();
        self.command(&split, Destination::Nothing).await
    }

    /// One command of arguments in pieces, and where the bytes go that it is answered by.
    pub(super) async fn command(
        &mut self,
        arguments: &[Vec<Bytes>],
        into: Destination<'_>,
    ) -> Result<Reply, Failure> {
        match self.send(arguments).await {
            Ok(()) => self.reply(into).await,
            Err(error) => Err(self.last_words(error).await),
        }
    }

    async fn send(&mut self, arguments: &[Vec<Bytes>]) -> io::Result<()> {
        let mut buffer = format!("*{}\r\n", arguments.len()).into_bytes();
        for argument in arguments {
            let len: usize = argument.iter().map(Bytes::len).sum();
            buffer.extend_from_slice(format!("${len}\r\n").as_bytes());
            for piece in argument {
                if piece.len() <= SMALL_BYTES {
                    buffer.extend_from_slice(piece);
                } else {
                    self.socket.write_all(&buffer).await?;
                    buffer.clear();
                    self.socket.write_all(piece).await?;
                }
            }
            buffer.extend_from_slice(b"\r\n");
        }
        self.socket.write_all(&buffer).await?;
        self.socket.flush().await
    }

    /// Why a server closed the connection before it had all: one that takes no value so large says so first.
    async fn last_words(&mut self, error: io::Error) -> Failure {
        match timeout(LAST_WORDS_WITHIN, self.reply(Destination::Nothing)).await {
            // An outage may be only this connection's: a fresh one tells.
            Ok(Err(Failure::Refused { refusal, .. })) if !refusal.is_outage() => Failure::Refused {
                refusal,
                is_sound: false,
            },
            _ => Failure::Broken(error),
        }
    }

    async fn reply(&mut self, into: Destination<'_>) -> Result<Reply, Failure> {
        let mut read = Vec::with_capacity(MAX_LINE);
        let end = loop {
            if let Some(end) = read.windows(2).position(|two| two == b"\r\n") {
                break end;
            }
            if read.len() >= MAX_LINE {
                return Err(Failure::protocol("its answer has no end"));
            }
            let room = MAX_LINE - read.len();
            if self.socket.read_buf(&mut (&mut read).limit(room)).await? == 0 {
                return Err(Failure::Broken(io::ErrorKind::UnexpectedEof.into()));
            }
        };
        let (line, rest) = (read[..end].to_vec(), &read[end + 2..]);
        let text = || String::from_utf8_lossy(&line[1..]).into_owned();
        match line.first() {
            Some(b'$') => match text().parse::<i64>() {
                Ok(-1) => Ok(Reply::Bulk(None)),
                Ok(len) if len >= 0 && len.cast_unsigned() <= into.most() => {
                    self.bulk(len as usize, rest, into).await
                }
                _ => Err(Failure::protocol(
                    "its answer has another length than can be",
                )),
            },
            Some(b'+') if rest.is_empty() => Ok(Reply::Word(text())),
            Some(b'-') if rest.is_empty() => {
                let whole = [&line[..], b"\r\n"].concat();
                let error = redis::parse_redis_value(&whole).and_then(redis::Value::extract_error);
                Err(Failure::Refused {
                    refusal: match error {
                        Err(error) if self.is_secret => refusal_of_credentials(&error),
                        Err(error) => refusal(&error),
                        Ok(_) => Refusal::Protocol("its error is none".into()),
                    },
                    // Behind this one it closes.
                    is_sound: !line.starts_with(b"-ERR Protocol error"),
                })
            }
            _ => Err(Failure::protocol("its answer is none of Redis's")),
        }
    }

    /// The bytes of an answer; `begin` are those that came with its first line.
    async fn bulk(
        &mut self,
        len: usize,
        begin: &[u8],
        into: Destination<'_>,
    ) -> Result<Reply, Failure> {
        if begin.len() > len + 2 {
            return Err(Failure::protocol("it answers what nobody asked"));
        }
        let (begin, after) = begin.split_at(begin.len().min(len));
        match into {
            Destination::Nothing => {}
            Destination::Memory(memory, _) => {
                memory.clear();
                memory.reserve_exact(len);
                memory.extend_from_slice(begin);
                while memory.len() < len {
                    let room = len - memory.len();
                    some(
                        self.socket
                            .read_buf(&mut (&mut *memory).limit(room))
                            .await?,
                    )?;
                }
            }
            Destination::Landing(landing) => {
                landing
                    .expect(len as u64)
                    .map_err(|refusal| Failure::Refused {
                        refusal,
                        is_sound: false,
                    })?;
                landing.push(begin).await;
                while !landing.is_whole() {
                    let room = landing.room().await;
                    if room.is_empty() {
                        self.is_spent = true;
                        return Ok(Reply::Bulk(Some(len)));
                    }
                    let count = some(self.socket.read(room).await?)?;
                    landing.filled(count);
                }
            }
        }
        let mut end = [0; 2];
        end[..after.len()].copy_from_slice(after);
        self.socket.read_exact(&mut end[after.len()..]).await?;
        if end != *b"\r\n" {
            return Err(Failure::protocol("its answer does not end where it should"));
        }
        Ok(Reply::Bulk(Some(len)))
    }
}

/// Bytes that came, or the end where none was due.
fn some(count: usize) -> Result<usize, Failure> {
    match count {
        0 => Err(Failure::Broken(io::ErrorKind::UnexpectedEof.into())),
        count => Ok(count),
    }
}

#[cfg(test)]
mod tests {
    use lmcache_memory::local_cpu::LocalCpu;

    use super::*;
    use crate::remote::Options;
    use crate::remote::landing::Turn;

    /// What is made of an answer that comes in pieces of so many bytes, and the bytes in it.
    fn reply_to(answer: &[u8], piece: usize, most: u64) -> Result<(Reply, Vec<u8>), String> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let (mut theirs, ours) = tokio::io::duplex(1 << 16);
            let answer = answer.to_vec();
            let sending = tokio::spawn(async move {
                for part in answer.chunks(piece) {
                    theirs.write_all(part).await.expect("room for all");
                    tokio::task::yield_now().await;
                }
            });
            let mut wire = Wire {
                socket: Box::pin(ours),
                is_spent: false,
                is_secret: false,
            };
            let mut memory = Vec::new();
            let reply = wire.reply(Destination::Memory(&mut memory, most)).await;
            sending.await.expect("no panic");
            match reply {
                Ok(reply) => Ok((reply, memory)),
                Err(failure) => Err(failure.into_refusal().name().to_owned()),
            }
        })
    }

    #[test]
    fn an_answer_is_read_in_any_pieces_or_refused() {
        let bulk = |bytes: &[u8]| Ok((Reply::Bulk(Some(bytes.len())), bytes.to_vec()));
        let refused = |name: &str| Err(name.to_owned());
        for piece in [1, 2, 3, 100] {
            let read = |answer: &[u8]| reply_to(answer, piece, 8);
            assert_eq!(read(b"+OK\r\n"), Ok((Reply::Word("OK".into()), Vec::new())));
            assert_eq!(read(b"$-1\r\n"), Ok((Reply::Bulk(None), Vec::new())));
            assert_eq!(read(b"$0\r\n\r\n"), bulk(b""));
            assert_eq!(read(b"$5\r\na\r\nbc\r\n"), bulk(b"a\r\nbc"));
            assert_eq!(read(b"-OOM no\r\n"), refused("full"));
            assert_eq!(read(b"-ERR no\r\n"), refused("server"));
            for wrong in [
                &b"$9\r\n123456789\r\n"[..],
                b"$-2\r\n",
                b"$x\r\n",
                b"$99999999999999999999\r\n",
                b"$2\r\nabXY",
                b"HTTP/1.1 400 Bad Request\r\n",
                b"\r\n",
                b":1\r\n",
                b"*1\r\n$1\r\na\r\n",
            ] {
                assert_eq!(read(wrong), refused("protocol"), "{wrong:?}");
            }
            for cut in [&b""[..], b"+OK", b"$5\r\nab", b"$5\r\nabcde\r"] {
                assert_eq!(read(cut), refused("unreachable"), "{cut:?}");
            }
        }
    }

    #[test]
    fn a_connection_with_an_answer_left_in_it_is_used_no_more() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .expect("a runtime");
        let pool = LocalCpu::new(1 << 20, Duration::from_secs(60)).expect("memory");
        // No object: of the longer one that is known before its end.
        for (len, is_left) in [(100, false), (5000, true)] {
            runtime.block_on(async {
                let (mut theirs, ours) = tokio::io::duplex(1 << 16);
                let answer = [format!("${len}\r\n").as_bytes(), &vec![0; len], b"\r\n"].concat();
                theirs.write_all(&answer).await.expect("room for all");
                let mut wire = Wire {
                    socket: Box::pin(ours),
                    is_spent: false,
                    is_secret: false,
                };
                let turn = Turn::default();
                let mut landing =
                    Landing::new("key".into(), &Options::default(), pool.clone(), turn);
                let reply = wire.reply(Destination::Landing(&mut landing)).await;
                assert_eq!(reply.ok(), Some(Reply::Bulk(Some(len))));
                assert_eq!(wire.is_spent, is_left);
            });
        }
    }

    #[test]
    fn a_line_without_an_end_is_refused() {
        let endless = vec![b'x'; 3 * MAX_LINE];
        assert_eq!(reply_to(&endless, 1000, 8), Err("protocol".into()));
    }
}
