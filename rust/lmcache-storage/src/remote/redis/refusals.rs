//! From the driver's errors to ours.

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};

use crate::remote::client::Refusal;

/// What an error means for a tier. A server's words never hold what was sent to it but a command's name.
pub(super) fn refusal(error: &RedisError) -> Refusal {
    let words = error.to_string();
    match error.kind() {
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => Refusal::Protocol(words),
        ErrorKind::AuthenticationFailed => Refusal::Denied(words),
        ErrorKind::Server(kind) => match kind {
            ServerErrorKind::NoPerm | ServerErrorKind::ReadOnly => Refusal::Denied(words),
            ServerErrorKind::BusyLoading
            | ServerErrorKind::MasterDown
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::TryAgain
            | ServerErrorKind::Moved
            | ServerErrorKind::Ask => Refusal::Unreachable(words),
            // The one error without a code of its own that is about the connection.
            _ if words.contains("max number of clients") => Refusal::Unreachable(words),
            _ => Refusal::Server(words),
        },
        ErrorKind::Extension => match error.code() {
            Some("NOAUTH" | "WRONGPASS" | "DENIED") => Refusal::Denied(words),
            // MISCONF: it cannot write its snapshot, and takes nothing until it can.
            Some("OOM" | "MISCONF" | "NOREPLICAS") => Refusal::Full(words),
            _ => Refusal::Server(words),
        },
        _ if error.is_timeout() => Refusal::Timeout,
        _ => Refusal::Unreachable(words),
    }
}

/// An answer of a kind that the command does not have.
pub(super) fn unexpected(command: &str, found: &Value) -> Refusal {
    let kind = match found {
        Value::Nil => "nothing",
        Value::Int(_) => "a number",
        Value::BulkString(_) | Value::SimpleString(_) => "text",
        Value::Array(_) => "an array",
        Value::Okay => "OK",
        _ => "something else",
    };
    Refusal::Protocol(format!("{command} is answered by {kind}"))
}
