//! The part of ZMTP 3.0 that a ROUTER and its DEALER peers need, without I/O.
//!
//! Written here, because a peer must not be able to hurt the process it asks: a frame's length is checked
//! before a byte is reserved for it, whereas the `zeromq` crate reserves what the header states and aborts
//! the process when that is more than there is.

use thiserror::Error;

/// Length of a greeting in bytes.
pub(crate) const GREETING_BYTES: usize = 64;

/// The longest command that is accepted, in bytes. READY carries two or three short properties.
pub(crate) const MAX_COMMAND_BYTES: usize = 1024;

/// The longest identity that ZMTP knows, in bytes.
pub(crate) const MAX_IDENTITY_BYTES: usize = 255;

const FLAG_MORE: u8 = 0b001;
const FLAG_LONG: u8 = 0b010;
const FLAG_COMMAND: u8 = 0b100;

/// Why a connection is given up.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum ZmtpError {
    #[error("the peer's greeting is not one of ZMTP 3 with the NULL mechanism")]
    Greeting,
    #[error("the peer's READY is malformed")]
    Ready,
    #[error("the peer is a {found:?} socket, not a {wanted}")]
    SocketType { found: String, wanted: &'static str },
    #[error("the peer does not know this server's secret")]
    Stranger,
    #[error("a frame has reserved flags set: {flags:#010b}")]
    Flags { flags: u8 },
    #[error("a frame of {num_bytes} bytes; {limit} are accepted")]
    TooLarge { num_bytes: u64, limit: usize },
}

/// One frame, as far as this protocol cares.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Frame<'a> {
    Command(&'a [u8]),
    Message { body: &'a [u8], more: bool },
}

/// What both sides send first.
pub(crate) fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// Whether the peer's greeting can be served: version 3 or later, no security.
pub(crate) fn check_greeting(greeting: &[u8; GREETING_BYTES]) -> Result<(), ZmtpError> {
    let signed = greeting[0] == 0xff && greeting[9] & 1 == 1;
    let mechanism = greeting[12..32] == *b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    (signed && greeting[10] >= 3 && mechanism)
        .then_some(())
        .ok_or(ZmtpError::Greeting)
}

/// The READY command of a socket, framed. An identity of more than 255 bytes is cut.
pub(crate) fn ready(socket_type: &str, identity: &[u8]) -> Vec<u8> {
    let mut body = b"\x05READY".to_vec();
    put_property(&mut body, b"Socket-Type", socket_type.as_bytes());
    if !identity.is_empty() {
        let identity = &identity[..identity.len().min(MAX_IDENTITY_BYTES)];
        put_property(&mut body, b"Identity", identity);
    }
    let mut frame = match u8::try_from(body.len()) {
        Ok(len) => vec![FLAG_COMMAND, len],
        Err(_) => {
            let mut header = vec![FLAG_COMMAND | FLAG_LONG];
            header.extend((body.len() as u64).to_be_bytes());
            header
        }
    };
    frame.extend(body);
    frame
}

fn put_property(body: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    body.push(name.len() as u8);
    body.extend(name);
    body.extend((value.len() as u32).to_be_bytes());
    body.extend(value);
}

/// The peer's identity, empty if it has none, if the command is the READY of a `wanted` socket.
pub(crate) fn check_ready<'a>(
    command: &'a [u8],
    wanted: &'static str,
) -> Result<&'a [u8], ZmtpError> {
    let mut rest = command.strip_prefix(b"\x05READY").ok_or(ZmtpError::Ready)?;
    let (mut socket_type, mut identity): (_, &[u8]) = (None, &[]);
    while !rest.is_empty() {
        let (name, value, after) = split_property(rest).ok_or(ZmtpError::Ready)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            socket_type = Some(value);
        } else if name.eq_ignore_ascii_case(b"Identity") {
            identity = value;
        }
        rest = after;
    }
    let found = socket_type.ok_or(ZmtpError::Ready)?;
    if found != wanted.as_bytes() {
        let found = String::from_utf8_lossy(&found[..found.len().min(16)]).into_owned();
        return Err(ZmtpError::SocketType { found, wanted });
    }
    Ok(identity)
}

fn split_property(rest: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (&name_len, rest) = rest.split_first()?;
    let (name, rest) = rest.split_at_checked(name_len.into())?;
    let (value_len, rest) = rest.split_first_chunk::<4>()?;
    let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*value_len) as usize)?;
    Some((name, value, rest))
}

/// The first frame of `bytes` and how many bytes it takes; `None` if more must come.
///
/// A message frame above `limit` bytes is an error as soon as its header is there.
pub(crate) fn next_frame(
    bytes: &[u8],
    limit: usize,
) -> Result<Option<(Frame<'_>, usize)>, ZmtpError> {
    let Some((&flags, rest)) = bytes.split_first() else {
        return Ok(None);
    };
    let is_command = flags & FLAG_COMMAND != 0;
    if flags & !(FLAG_MORE | FLAG_LONG | FLAG_COMMAND) != 0 || is_command && flags & FLAG_MORE != 0
    {
        return Err(ZmtpError::Flags { flags });
    }
    let header = if flags & FLAG_LONG != 0 {
        rest.split_first_chunk::<8>()
            .map(|(len, rest)| (u64::from_be_bytes(*len), rest))
    } else {
        rest.split_first()
            .map(|(&len, rest)| (u64::from(len), rest))
    };
    let Some((num_bytes, rest)) = header else {
        return Ok(None);
    };
    let limit = if is_command { MAX_COMMAND_BYTES } else { limit };
    let len = usize::try_from(num_bytes).ok().filter(|&len| len <= limit);
    let len = len.ok_or(ZmtpError::TooLarge { num_bytes, limit })?;
    let Some((body, after)) = rest.split_at_checked(len) else {
        return Ok(None);
    };
    let frame = if is_command {
        Frame::Command(body)
    } else {
        Frame::Message {
            body,
            more: flags & FLAG_MORE != 0,
        }
    };
    Ok(Some((frame, bytes.len() - after.len())))
}

/// Appends a message of one frame.
pub(crate) fn put_message(out: &mut Vec<u8>, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(len) => out.extend([0, len]),
        Err(_) => {
            out.push(FLAG_LONG);
            out.extend((body.len() as u64).to_be_bytes());
        }
    }
    out.extend(body);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn our_own_greeting_passes() {
        assert_eq!(check_greeting(&greeting()), Ok(()));
    }

    #[test]
    fn other_versions_and_mechanisms_are_refused() {
        for (at, to) in [(0, 0), (9, 0), (10, 2), (12, b'P'), (16, b'X')] {
            let mut bad = greeting();
            bad[at] = to;
            assert_eq!(check_greeting(&bad), Err(ZmtpError::Greeting), "byte {at}");
        }
    }

    #[test]
    fn only_the_socket_that_is_wanted_passes() {
        let dealer = ready("DEALER", b"");
        assert_eq!(check_ready(&dealer[2..], "DEALER"), Ok(&b""[..]));
        let refused = ZmtpError::SocketType {
            found: "DEALER".into(),
            wanted: "ROUTER",
        };
        assert_eq!(check_ready(&dealer[2..], "ROUTER"), Err(refused));
        for broken in [
            &b"\x05READY"[..],
            b"\x05READY\x0bSocket-Type\xff\xff\xff\xffX",
            b"\x05ERROR\x00",
        ] {
            assert_eq!(check_ready(broken, "DEALER"), Err(ZmtpError::Ready));
        }
    }

    #[test]
    fn an_identity_of_any_length_arrives() {
        for len in [0, 1, 64, 200, 255] {
            let identity = vec![b'i'; len];
            let frame = ready("DEALER", &identity);
            let (command, used) = next_frame(&frame, 0).expect("a frame").expect("all of it");
            let Frame::Command(command) = command else {
                panic!("{command:?}")
            };
            assert_eq!(used, frame.len());
            assert_eq!(check_ready(command, "DEALER"), Ok(&identity[..]));
        }
    }

    #[test]
    fn a_length_is_refused_before_its_bytes_come() {
        let mut header = vec![FLAG_LONG];
        header.extend((1u64 << 50).to_be_bytes());
        let refused = ZmtpError::TooLarge {
            num_bytes: 1 << 50,
            limit: 1000,
        };
        assert_eq!(next_frame(&header, 1000), Err(refused));
        let refused = ZmtpError::TooLarge {
            num_bytes: 201,
            limit: 200,
        };
        assert_eq!(next_frame(&[0, 201], 200), Err(refused));
        assert_eq!(next_frame(&[0, 200], 200), Ok(None));
    }

    proptest! {
        #[test]
        fn messages_round_trip_in_any_pieces(
            bodies in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..600), 0..5),
            piece in 1usize..700,
        ) {
            let mut stream = Vec::new();
            for body in &bodies {
                put_message(&mut stream, body);
            }
            let (mut inbox, mut found) = (Vec::new(), Vec::new());
            for piece in stream.chunks(piece) {
                inbox.extend(piece);
                while let Some((frame, used)) = next_frame(&inbox, 600).expect("a good stream") {
                    let Frame::Message { body, more: false } = frame else { panic!("{frame:?}") };
                    found.push(body.to_vec());
                    inbox.drain(..used);
                }
            }
            prop_assert_eq!(found, bodies);
            prop_assert!(inbox.is_empty());
        }

        #[test]
        fn any_bytes_are_a_frame_or_wait_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            if let Ok(Some((_, used))) = next_frame(&bytes, 64) {
                prop_assert!(used > 0 && used <= bytes.len());
            }
            let _ = check_ready(&bytes, "DEALER");
        }
    }
}
