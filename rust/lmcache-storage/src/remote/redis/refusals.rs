//! From the driver's errors to ours.

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};

use crate::remote::client::Refusal;

/// Letters of another's words that are shown.
const MAX_WORDS: usize = 200;
const NO_PLACE: &str = "max number of clients";
const TOO_LONG: &str = "invalid bulk length";

/// What of another's words may be shown: a line of bounded length, without what was sent.
fn shown(words: &str) -> String {
    // Of a command that it does not know, be it AUTH, a server repeats the arguments.
    let lower = words.to_ascii_lowercase();
    let end = lower.find("with args").unwrap_or(words.len());
    let words = words[..end].trim_end_matches([',', ' ']).chars();
    let words = words.map(|letter| if letter.is_control() { ' ' } else { letter });
    words.take(MAX_WORDS).collect()
}

/// What an error means for a tier.
pub(super) fn refusal(error: &RedisError) -> Refusal {
    // Of a pipeline's errors the first is as good as any.
    let of_server = error.clone().into_server_errors();
    if let Some([(_, first), ..]) = of_server.as_deref() {
        let words = first.to_string();
        return of_code(first.kind(), first.code(), &words, shown(&words));
    }
    let words = shown(&error.to_string());
    match error.kind() {
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => Refusal::Protocol(words),
        ErrorKind::AuthenticationFailed => Refusal::Denied(words),
        ErrorKind::Server(kind) => of_code(Some(kind), "", &words, words.clone()),
        _ if error.is_timeout() => Refusal::Timeout,
        _ => Refusal::Unreachable(words),
    }
}

/// What an error means that answers credentials: nothing of its words is shown but a code, since what was sent may
/// be among them in any form.
pub(super) fn refusal_of_credentials(error: &RedisError) -> Refusal {
    let of_server = error.clone().into_server_errors();
    let Some([(_, first), ..]) = of_server.as_deref() else {
        return Refusal::Protocol("AUTH is answered by what is no error".into());
    };
    let code = first.code();
    let is_code = code.len() <= 20 && code.bytes().all(|byte| byte.is_ascii_uppercase());
    let words = format!(
        "AUTH is answered by {}",
        if is_code { code } else { "an error" }
    );
    of_code(first.kind(), code, &first.to_string(), words)
}

/// What an error that a server reports means, by its kind if the driver knows one, by its code, and by what was
/// `said`; `words` are what is shown.
fn of_code(kind: Option<ServerErrorKind>, code: &str, said: &str, words: String) -> Refusal {
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
        // Errors without a code of their own: about the connection, and about the value.
        Some(_) if said.contains(NO_PLACE) => Refusal::Unreachable(words),
        Some(_) if said.contains(TOO_LONG) => Refusal::TooLarge,
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
            ("-ERR Protocol error: invalid bulk length\r\n", "too_large"),
            (
                "-WRONGTYPE Operation against a key holding the wrong kind\r\n",
                "server",
            ),
            ("-ERR unknown command\r\n", "server"),
        ] {
            assert_eq!(of_server(line).name(), name, "{line}");
        }
    }

    #[test]
    fn nothing_that_was_sent_is_shown() {
        let line = "-ERR unknown command 'AUTH', with args beginning with: 'user' 'hunter2' \r\n";
        let said = of_server(line).to_string();
        assert!(said.contains("unknown command 'AUTH'"), "{said}");
        assert!(
            !said.contains("user") && !said.contains("hunter2"),
            "{said}"
        );
        let long = format!("-ERR {}\u{1b}[31m{}\r\n", "é".repeat(100), "x".repeat(5000));
        let said = of_server(&long).to_string();
        assert!(said.chars().count() < MAX_WORDS + 20, "{said}");
        assert!(!said.contains('\u{1b}'), "{said}");
    }

    #[test]
    fn of_what_answers_credentials_the_code_alone_is_shown() {
        let of = |line: &str| {
            let parsed = redis::parse_redis_value(line.as_bytes()).expect("an error is a value");
            refusal_of_credentials(&parsed.extract_error().expect_err("an error"))
        };
        for (line, name) in [
            ("-WRONGPASS hunter2 is no password\r\n", "denied"),
            ("-ERR no AUTH for 'hunter2'\r\n", "server"),
            ("-LOADING hunter2\r\n", "unreachable"),
            ("-ERR max number of clients reached\r\n", "unreachable"),
            ("-hunter2 what\r\n", "server"),
        ] {
            let refusal = of(line);
            assert_eq!(refusal.name(), name, "{line}");
            assert!(!refusal.to_string().contains("hunter2"), "{refusal}");
        }
        assert!(of("-WRONGPASS x\r\n").to_string().contains("WRONGPASS"));
    }
}
