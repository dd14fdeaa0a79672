//! From the driver's errors to ours.

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};

use crate::remote::client::Refusal;

/// What an error means for a tier. A server's words never hold what was sent to it but a command's name.
pub(super) fn refusal(error: &RedisError) -> Refusal {
    let words = error.to_string();
    // Of a pipeline's errors the first is as good as any.
    let of_server = error.clone().into_server_errors();
    if let Some([(_, first), ..]) = of_server.as_deref() {
        return of_code(first.kind(), first.code(), words);
    }
    match error.kind() {
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => Refusal::Protocol(words),
        ErrorKind::AuthenticationFailed => Refusal::Denied(words),
        ErrorKind::Server(kind) => of_code(Some(kind), "", words),
        _ if error.is_timeout() => Refusal::Timeout,
        _ => Refusal::Unreachable(words),
    }
}

/// What an error that a server reports means, by its kind if the driver knows one, and by its code.
fn of_code(kind: Option<ServerErrorKind>, code: &str, words: String) -> Refusal {
    match kind {
        Some(ServerErrorKind::NoPerm | ServerErrorKind::ReadOnly) => Refusal::Denied(words),
        Some(
            ServerErrorKind::BusyLoading
            | ServerErrorKind::MasterDown
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::TryAgain
            | ServerErrorKind::Moved
            | ServerErrorKind::Ask,
        ) => Refusal::Unreachable(words),
        // The one error without a code of its own that is about the connection.
        Some(_) if words.contains("max number of clients") => Refusal::Unreachable(words),
        Some(_) => Refusal::Server(words),
        None => match code {
            "NOAUTH" | "WRONGPASS" | "DENIED" => Refusal::Denied(words),
            // MISCONF: it cannot write its snapshot, and takes nothing until it can.
            "OOM" | "MISCONF" | "NOREPLICAS" => Refusal::Full(words),
            _ => Refusal::Server(words),
        },
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

#[cfg(test)]
mod tests {
    use super::*;

    fn of_server(line: &str) -> Refusal {
        let parsed = redis::parse_redis_value(line.as_bytes()).expect("an error is a value");
        refusal(&parsed.extract_error().expect_err("an error"))
    }

    #[test]
    fn each_error_has_its_meaning() {
        for (line, name) in [
            ("-NOAUTH Authentication required.\r\n", "denied"),
            ("-WRONGPASS invalid username-password pair\r\n", "denied"),
            (
                "-NOPERM no permissions to run the 'set' command\r\n",
                "denied",
            ),
            (
                "-READONLY You can't write against a read only replica.\r\n",
                "denied",
            ),
            (
                "-OOM command not allowed when used memory > 'maxmemory'.\r\n",
                "full",
            ),
            (
                "-MISCONF Redis is configured to save RDB snapshots\r\n",
                "full",
            ),
            (
                "-LOADING Redis is loading the dataset in memory\r\n",
                "unreachable",
            ),
            ("-CLUSTERDOWN The cluster is down\r\n", "unreachable"),
            ("-ERR max number of clients reached\r\n", "unreachable"),
            (
                "-WRONGTYPE Operation against a key holding the wrong kind\r\n",
                "server",
            ),
            ("-ERR unknown command\r\n", "server"),
        ] {
            assert_eq!(of_server(line).name(), name, "{line}");
        }
    }
}
